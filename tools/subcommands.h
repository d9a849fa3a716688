// Every subcommand: adds its options to the parser and says what to run. One file each.
#pragma once

#include "tools/flags.h"

namespace sparsemla::tool {

Subcommand add_env(CLI::App& parent);
Subcommand add_gen(CLI::App& parent);
Subcommand add_decode(CLI::App& parent);
Subcommand add_check(CLI::App& parent);
Subcommand add_plan(CLI::App& parent);
Subcommand add_convert(CLI::App& parent);
Subcommand add_info(CLI::App& parent);
Subcommand add_bench(CLI::App& parent);
Subcommand add_dcp(CLI::App& parent);
Subcommand add_support(CLI::App& parent);

}  // namespace sparsemla::tool
