// The pieces that plots are drawn with.
#pragma once

#include <array>
#include <string>

namespace sparsemla::tool::svg {

/// Distinguishable with the common colour deficiencies too.
inline constexpr std::array<const char*, 7> colours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                       "#e69f00", "#56b4e9", "#555555"};
inline constexpr double character_width = 7.4;

/// The opening tag and a white background.
std::string begin(double width, double height);
/// `anchor`: start, middle or end. `style`: further attributes.
std::string text(double x, double y, const char* anchor, const char* style, const std::string& content);
std::string line(double x1, double y1, double x2, double y2, const std::string& colour, double width,
                 bool dashed = false);
std::string circle(double x, double y, double radius, const std::string& colour);

/// "20 us" for 2 and -5: step * 10^decade seconds.
std::string tick_label(double step, int decade);

}  // namespace sparsemla::tool::svg
