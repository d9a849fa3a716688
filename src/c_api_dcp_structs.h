// Between the C structs of sparsemla_dcp.h and the library's own.
#pragma once

#include "c_api_structs.h"
#include "mailbox_view.h"
#include "sparsemla/mailbox.h"
#include "sparsemla/sparsemla_dcp.h"
#include "sparsemla/topk.h"

namespace sparsemla::detail {

/// Points to the given head offsets.
ShapeView to_shape(const sparsemla_dcp_shape* given, const ArgumentName& argument);
Mailbox to_mailbox(const sparsemla_mailbox* given, const ArgumentName& argument);
GatherQueryArgs to_gather_query_args(const sparsemla_gather_query_args* given);
PushArgs to_push_args(const sparsemla_push_args* given);
MergePushedArgs to_merge_pushed_args(const sparsemla_merge_pushed_args* given);
MergeTopkArgs to_merge_topk_args(const sparsemla_merge_topk_args* given);

sparsemla_dcp_shape from_shape(const ShapeView& shape);
sparsemla_mailbox_layout from_mailbox_layout(const MailboxLayout& layout);
/// Without shape and bases.
sparsemla_mailbox from_mailbox(const Mailbox& mailbox);
sparsemla_mailbox_status from_mailbox_status(const MailboxStatus& status);

}  // namespace sparsemla::detail
