// Every record in every form that a source may have: what tests run over.
#pragma once

#include <string>
#include <vector>

#include "sparsemla/records.h"

namespace sparsemla::test {

/// A record in one of the forms that a source may have.
struct Layout {
    Record record = Record::fp8_576;
    RecordForm form = RecordForm::contiguous;
    bool split_rope = false;

    const RecordLayout& bytes() const { return layout_of(record); }
};

/// "fp8_576", "bf16_1152_split", "nvfp4_v41_288_planar": a name that test names may hold.
inline std::string name(const Layout& layout) {
    return std::string(layout.bytes().name) + "_" + std::to_string(layout.bytes().record_bytes) +
           (layout.form == RecordForm::planar ? "_planar" : "") + (layout.split_rope ? "_split" : "");
}

/// Every record in every form.
inline std::vector<Layout> layouts() {
    std::vector<Layout> all;
    for (const RecordLayout& layout : record_layouts) {
        if (layout.has_contiguous) all.push_back({layout.record, RecordForm::contiguous, false});
        if (layout.may_split) all.push_back({layout.record, RecordForm::contiguous, true});
        if (layout.has_planar) all.push_back({layout.record, RecordForm::planar, false});
    }
    return all;
}

}  // namespace sparsemla::test
