// How --help is laid out: 100 columns, and groups of options instead of dependencies spelled out at each.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace sparsemla::tool {

class HelpFormatter : public CLI::Formatter {
   public:
    HelpFormatter();
    /// " NAME=default (required)"
    std::string make_option_opts(const CLI::Option* option) const override;
    /// The description, broken into lines.
    std::string make_option_desc(const CLI::Option* option) const override;
};

/// A parse error as one sentence that says what is needed and what came.
std::string parse_error_text(const CLI::ParseError& error);

}  // namespace sparsemla::tool
