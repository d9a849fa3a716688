#include "nccl/api.h"

#include <dlfcn.h>

namespace sparsemla::detail {

namespace {

[[noreturn]] void refuse(const std::string& library, const std::string& received) {
    throw Error(ErrorKind::unsupported, "library " + library,
                "NCCL 2, 2.28 or newer, which ranks of the nccl provider need", received);
}

template <class Function>
void find(void* handle, const NcclApi& api, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    if (function == nullptr)
        refuse(api.library, (api.version == 0 ? "a library" : nccl_version_text(api.version)) + " without " + name);
}

}  // namespace

std::string nccl_version_text(int version) {
    return std::to_string(version / 10000) + '.' + std::to_string(version / 100 % 100) + '.' +
           std::to_string(version % 100);
}

NcclApi load_nccl(const std::string& library) {
    NcclApi api;
    api.library = library;
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* text = dlerror();
        refuse(library, text == nullptr ? "nothing" : text);
    }
    find(handle, api, "ncclGetVersion", api.get_version);
    if (api.get_version(&api.version) != nccl_success) refuse(library, "a library that does not tell its version");
    if (api.version < oldest_nccl || api.version / 10000 != 2)
        refuse(library,
               api.version < 10000 ? "version code " + std::to_string(api.version) : nccl_version_text(api.version));
    find(handle, api, "ncclGetUniqueId", api.get_unique_id);
    find(handle, api, "ncclCommInitRankConfig", api.comm_init);
    find(handle, api, "ncclCommGetAsyncError", api.comm_async_error);
    find(handle, api, "ncclCommFinalize", api.comm_finalize);
    find(handle, api, "ncclCommDestroy", api.comm_destroy);
    find(handle, api, "ncclCommAbort", api.comm_abort);
    find(handle, api, "ncclGetErrorString", api.error_text);
    find(handle, api, "ncclGetLastError", api.last_error);
    find(handle, api, "ncclMemAlloc", api.mem_alloc);
    find(handle, api, "ncclMemFree", api.mem_free);
    find(handle, api, "ncclCommWindowRegister", api.window_register);
    find(handle, api, "ncclCommWindowDeregister", api.window_deregister);
    if (api.version >= nccl_with_peer_pointers)
        find(handle, api, "ncclGetPeerDevicePointer", api.peer_pointer);
    else
        find(handle, api, "ncclTeamLsa", api.team_lsa);
    find(handle, api, "ncclAllGather", api.all_gather);
    find(handle, api, "ncclSend", api.send);
    find(handle, api, "ncclRecv", api.recv);
    find(handle, api, "ncclGroupStart", api.group_start);
    find(handle, api, "ncclGroupEnd", api.group_end);
    return api;
}

NcclId NcclApi::new_id() const {
    NcclId id;
    const int result = get_unique_id(&id);
    if (result != nccl_success) throw Error(ErrorKind::device, "ncclGetUniqueId", "success", text_of(result, nullptr));
    return id;
}

std::string NcclApi::text_of(int result, NcclComm comm) const {
    const char *text = error_text(result), *last = last_error(comm);
    std::string all = text == nullptr ? "result " + std::to_string(result) : text;
    if (last != nullptr && *last != '\0') all += std::string(": ") + last;
    return all;
}

}  // namespace sparsemla::detail
