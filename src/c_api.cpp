// The C interface: structs to the library's own, one call, exceptions to statuses.
#include <optional>

#include "c_api_error.h"
#include "c_api_structs.h"
#include "sparsemla/mailbox.h"

/// A plan with the texts that sparsemla_plan_info points into.
struct sparsemla_plan {
    sparsemla::Plan plan;
    std::string schedule;
    std::string description;
};

using namespace sparsemla;
using namespace sparsemla::detail;

extern "C" {

const char* sparsemla_version(void) { return SPARSEMLA_VERSION; }

sparsemla_status sparsemla_query_device(int32_t device_kind, int32_t device_index, sparsemla_device_spec* out) {
    return guarded([&] {
        stated_size(out, sizeof *out, "out");
        write_struct(from_device_spec(query_device(to_device(device_kind, device_index, "device"))), out, sizeof *out,
                     "out");
    });
}

sparsemla_status sparsemla_find_record(const char* name, int64_t record_bytes, sparsemla_record_layout* out) {
    return guarded([&] {
        const RecordLayout& layout = find_layout(&not_null(name, "name"), record_bytes);
        write_struct(from_layout(layout), out, offsetof(sparsemla_record_layout, data_bytes), "out");
    });
}

sparsemla_status sparsemla_cache_bytes(const sparsemla_cache* cache, int64_t* out_bytes) {
    return guarded([&] {
        const CacheView view = to_cache(cache, "cache");
        not_null(out_bytes, "out_bytes");
        *out_bytes = cache_bytes(view);
    });
}

sparsemla_status sparsemla_pack(const sparsemla_cache* cache, const sparsemla_tensor* values,
                                const sparsemla_tensor* slots, const sparsemla_pack_options* options, void* stream) {
    return guarded([&] {
        pack(to_cache(cache, "cache"), to_const_tensor(not_null(values, "values"), "values"),
             to_const_tensor(not_null(slots, "slots"), "slots"), to_pack_options(options), {stream});
    });
}

sparsemla_status sparsemla_unpack(const sparsemla_cache* cache, const sparsemla_tensor* slots,
                                  const sparsemla_tensor* out, void* stream) {
    return guarded([&] {
        unpack(to_cache(cache, "cache"), to_const_tensor(not_null(slots, "slots"), "slots"),
               to_tensor(not_null(out, "out"), "out"), {stream});
    });
}

sparsemla_status sparsemla_quantize_query(const sparsemla_tensor* in, float q_scale, const sparsemla_tensor* out,
                                          void* stream) {
    return guarded([&] {
        quantize_query(to_const_tensor(not_null(in, "in"), "in"), q_scale, to_tensor(not_null(out, "out"), "out"),
                       {stream});
    });
}

sparsemla_status sparsemla_convert_indices(const sparsemla_convert_args* args, void* stream) {
    return guarded([&] { convert_indices(to_convert_args(args), {stream}); });
}

sparsemla_status sparsemla_local_length(int64_t length, int64_t world, int64_t rank, int64_t interleave,
                                        int64_t* out_length) {
    return guarded([&] {
        const Sharding sharding = to_sharding(world, rank, interleave);
        not_null(out_length, "out_length") = local_length(length, sharding);
    });
}

sparsemla_status sparsemla_global_id(int64_t local, int64_t world, int64_t rank, int64_t interleave,
                                     int64_t* out_token) {
    return guarded([&] {
        const Sharding sharding = to_sharding(world, rank, interleave);
        // The token is below (local + interleave) * world.
        constexpr std::int64_t most = INT64_MAX;
        if (local < 0 || local > most / world - interleave)
            throw Error(ErrorKind::invalid_argument, "local", "0 or more, with a token id that 64 bits hold",
                        std::to_string(local));
        not_null(out_token, "out_token") = global_of(local, sharding);
    });
}

sparsemla_status sparsemla_plan_create(const sparsemla_problem* problem, const sparsemla_device_spec* device,
                                       const sparsemla_plan_options* options, sparsemla_plan** out_plan) {
    return guarded([&] {
        not_null(out_plan, "out_plan");
        Plan plan = make_plan(to_problem(problem), to_device_spec(device), to_plan_options(options));
        std::string schedule = to_string(plan.schedule);
        std::string description = plan.describe();
        *out_plan = new sparsemla_plan{std::move(plan), std::move(schedule), std::move(description)};
    });
}

void sparsemla_plan_destroy(sparsemla_plan* plan) { delete plan; }

sparsemla_status sparsemla_plan_describe(const sparsemla_plan* plan, sparsemla_plan_info* out) {
    return guarded([&] {
        const Plan& made = not_null(plan, "plan").plan;
        sparsemla_plan_info info{};
        info.kernel = made.schedule.kernel.c_str();
        info.schedule = plan->schedule.c_str();
        info.description = plan->description.c_str();
        info.workspace_bytes = made.workspace_bytes;
        info.state_bytes = made.state_bytes;
        info.row_capacity = made.schedule.row_capacity;
        info.p_format = static_cast<std::int32_t>(made.schedule.p_format);
        info.p_scale = made.schedule.p_scale;
        info.anchor = static_cast<std::int32_t>(made.schedule.anchor);
        info.column_rule = static_cast<std::int32_t>(made.schedule.columns);
        info.splits = made.schedule.splits;
        info.chunk = made.schedule.chunk;
        if (made.tiling) {
            info.tile_heads = made.tiling->heads;
            info.stages = made.tiling->stages;
            info.transport = SPARSEMLA_TRANSPORT_STORES + static_cast<std::int32_t>(made.tiling->transport);
            info.trigger = SPARSEMLA_TRIGGER_START + static_cast<std::int32_t>(made.tiling->trigger);
            info.gather = SPARSEMLA_GATHER_COPIES + static_cast<std::int32_t>(made.tiling->gather);
            info.cluster_tiles = made.tiling->cluster_tiles;
        }
        info.fuses_exchange = made.fuses_exchange;
        write_struct(info, out, offsetof(sparsemla_plan_info, schedule), "out");
    });
}

sparsemla_status sparsemla_supports(const sparsemla_problem* problem, const sparsemla_device_spec* device,
                                    const sparsemla_plan_options* options, int32_t* out_supported) {
    return guarded([&] {
        not_null(out_supported, "out_supported");
        const std::optional<std::string> reason =
            refusal(to_problem(problem), to_device_spec(device), to_plan_options(options));
        if (reason) set_last_error(*reason);
        *out_supported = reason ? 0 : 1;
    });
}

sparsemla_status sparsemla_prepare(const sparsemla_plan* plan, void* state, uint64_t state_bytes, void* stream) {
    return guarded([&] {
        prepare(not_null(plan, "plan").plan, {state, static_cast<std::size_t>(state_bytes)}, {stream});
    });
}

sparsemla_status sparsemla_decode(const sparsemla_plan* plan, const sparsemla_decode_args* args, void* stream) {
    return guarded([&] {
        const Plan& made = not_null(plan, "plan").plan;
        Mailbox mailbox;
        decode(made, to_decode_args(args, made, mailbox), {stream});
    });
}

sparsemla_status sparsemla_merge(const sparsemla_merge_args* args, void* stream) {
    return guarded([&] {
        std::vector<Partial> partials;
        merge(to_merge_args(args, partials), {stream});
    });
}

}  // extern "C"
