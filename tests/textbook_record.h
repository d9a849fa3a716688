// The nine records as a textbook would write and read them: piece after piece, codes found by exhaustive search,
// nothing taken from record_layouts or formats.h. Slow.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "sparsemla/records.h"
#include "tests/brute_force.h"

namespace sparsemla::test {

/// One record: what lies with its values, and what lies in the page's second plane (fp8_v4, and the planar form of the
/// records that have both). A contiguous record of the latter is data, then scales.
struct RecordBytes {
    std::vector<std::uint8_t> data;
    std::vector<std::uint8_t> scales;

    std::vector<std::uint8_t> together() const {
        std::vector<std::uint8_t> bytes = data;
        bytes.insert(bytes.end(), scales.begin(), scales.end());
        return bytes;
    }
};

class TextbookWriter {
   public:
    TextbookWriter(const std::vector<float>& values, const PackOptions& options) : x_(values), options_(options) {}

    RecordBytes write(Record record) {
        switch (record) {
            case Record::bf16: bf16(0, 512), bf16(512, 64); break;
            case Record::fp8_576: e4m3(0, 512, options_.k_scale), e4m3(512, 64, options_.k_scale); break;
            case Record::fp8_512: e4m3(0, 512, options_.k_scale); break;
            case Record::fp8_ds_mla: f32_groups(), bf16(512, 64); break;
            case Record::fp8_ds_mla_norope: f32_groups(); break;
            case Record::fp8_v4:
                for (int group = 0; group < 7; ++group) ue8m0_group(group * 64, 64, 1e-4F);
                bf16(448, 64);
                out_.scales.push_back(0);
                break;
            case Record::fp8_v41:
                for (int group = 0; group < 16; ++group) ue8m0_group(group * 32, 32, 0.0F);
                break;
            case Record::nvfp4_v41:
                for (int group = 0; group < 32; ++group) out_.scales.push_back(e2m1_group(group * 16, false));
                break;
            case Record::nvfp4_ds_mla: {
                std::vector<std::uint8_t> scales(32);
                for (int group = 0; group < 32; ++group)
                    scales[8 * (group & 3) + (group >> 2)] = e2m1_group(group * 16, true);
                e4m3(512, 64, 1.0F);
                out_.data.insert(out_.data.end(), scales.begin(), scales.end());
                break;
            }
        }
        return out_;
    }

   private:
    static int sign(float x, int bit) { return std::signbit(x) ? bit : 0; }

    void bf16(int first, int dims) {
        for (int i = first; i < first + dims; ++i) {
            auto bits = std::bit_cast<std::uint32_t>(x_[i]);
            const std::uint32_t rest = bits & 0xFFFF;
            bits >>= 16;
            if (rest > 0x8000 || (rest == 0x8000 && bits % 2 == 1)) ++bits;
            if (std::isnan(x_[i])) bits = 0x7FFF;
            out_.data.push_back(static_cast<std::uint8_t>(bits));
            out_.data.push_back(static_cast<std::uint8_t>(bits >> 8));
        }
    }

    void e4m3(int first, int dims, float scale) {
        for (int i = first; i < first + dims; ++i) {
            const float quotient = x_[i] / scale;
            const int code =
                std::isnan(quotient) ? 0x7F : nearest_code(e4m3_magnitudes, quotient) | sign(quotient, 0x80);
            out_.data.push_back(static_cast<std::uint8_t>(code));
        }
    }

    float amax(int first, int dims) const {
        float largest = 0;
        for (int i = first; i < first + dims; ++i)
            if (std::isfinite(x_[i]) && std::fabs(x_[i]) > largest) largest = std::fabs(x_[i]);
        return largest;
    }

    /// The smallest code whose power of two is at least x.
    static int power_of_two_code(float x) {
        int code = 0;
        while (std::pow(2.0, code - 127) < x) ++code;
        return code;
    }

    void f32_groups() {
        std::vector<float> scales;
        for (int first = 0; first < 512; first += 128) {
            float scale = std::max(amax(first, 128) / 448.0F, std::numeric_limits<float>::min());
            if (options_.power_of_two_scales)
                scale = static_cast<float>(
                    std::pow(2.0, power_of_two_code(std::max(amax(first, 128) / 448.0F, 1e-4F)) - 127));
            e4m3(first, 128, scale);
            scales.push_back(scale);
        }
        for (float scale : scales)
            for (int byte = 0; byte < 4; ++byte)
                out_.data.push_back(static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> (8 * byte)));
    }

    void ue8m0_group(int first, int dims, float floor) {
        const int code = power_of_two_code(std::max(amax(first, dims) / 448.0F, floor));
        e4m3(first, dims, static_cast<float>(std::pow(2.0, code - 127)));
        out_.scales.push_back(static_cast<std::uint8_t>(code));
    }

    /// Appends the group's values and returns its scale's code.
    std::uint8_t e2m1_group(int first, bool round_up) {
        const float wanted = std::min(std::max(amax(first, 16) / 6.0F, 1.0F / 512), 448.0F);
        int code = nearest_code(e4m3_magnitudes, wanted);
        if (round_up && e4m3_magnitudes[code] < wanted) ++code;
        const auto scale = static_cast<float>(e4m3_magnitudes[code]);
        int codes[16];
        bool has_nan = false;
        for (int i = 0; i < 16; ++i) {
            const float quotient = x_[first + i] / scale;
            has_nan = has_nan || std::isnan(quotient);
            codes[i] = nearest_code(e2m1_magnitudes, quotient) | sign(quotient, 8);
        }
        for (int i = 0; i < 16; i += 2)
            out_.data.push_back(static_cast<std::uint8_t>(has_nan ? 0 : codes[i] + 16 * codes[i + 1]));
        return static_cast<std::uint8_t>(has_nan ? 0x7F : code);
    }

    const std::vector<float>& x_;
    PackOptions options_;
    RecordBytes out_;
};

class TextbookReader {
   public:
    explicit TextbookReader(const RecordBytes& bytes) : bytes_(bytes) {}

    std::vector<double> read(Record record) {
        switch (record) {
            case Record::bf16: bf16(512 + 64); break;
            case Record::fp8_576: e4m3(512 + 64); break;
            case Record::fp8_512: e4m3(512); break;
            case Record::fp8_ds_mla: f32_groups(), bf16(64); break;
            case Record::fp8_ds_mla_norope: f32_groups(); break;
            case Record::fp8_v4:
                for (int group = 0; group < 7; ++group) e4m3(64, ue8m0(bytes_.scales[group]));
                bf16(64);
                break;
            case Record::fp8_v41:
                for (int group = 0; group < 16; ++group) e4m3(32, ue8m0(bytes_.scales[group]));
                break;
            case Record::nvfp4_v41:
                for (int group = 0; group < 32; ++group) e2m1(16, value_of_e4m3(bytes_.scales[group]));
                break;
            case Record::nvfp4_ds_mla:
                for (int group = 0; group < 32; ++group)
                    e2m1(16, value_of_e4m3(bytes_.data[512 / 2 + 64 + 8 * (group & 3) + (group >> 2)]));
                e4m3(64);
                break;
        }
        return out_;
    }

   private:
    static double value_of_e4m3(std::uint8_t code) {
        if ((code & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
        return code < 128 ? e4m3_magnitudes[code] : -e4m3_magnitudes[code - 128];
    }
    static double ue8m0(std::uint8_t code) {
        return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::pow(2.0, code - 127);
    }

    void bf16(int dims) {
        for (int i = 0; i < dims; ++i, at_ += 2)
            out_.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bytes_.data[at_]) << 16 |
                                                static_cast<std::uint32_t>(bytes_.data[at_ + 1]) << 24));
    }
    void e4m3(int dims, double scale = 1) {
        for (int i = 0; i < dims; ++i) out_.push_back(scale * value_of_e4m3(bytes_.data[at_++]));
    }
    void e2m1(int dims, double scale) {
        for (int i = 0; i < dims; ++i) {
            const int code = i % 2 == 0 ? bytes_.data[at_] % 16 : bytes_.data[at_++] / 16;
            out_.push_back(scale * (code < 8 ? e2m1_magnitudes[code] : -e2m1_magnitudes[code - 8]));
        }
    }
    void f32_groups() {
        for (int group = 0; group < 4; ++group) {
            float scale;
            std::memcpy(&scale, bytes_.data.data() + 512 + 4 * group, sizeof(scale));
            e4m3(128, scale);
        }
        at_ += 4 * 4;
    }

    const RecordBytes& bytes_;
    std::size_t at_ = 0;
    std::vector<double> out_;
};

}  // namespace sparsemla::test
