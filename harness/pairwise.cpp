#include "harness/pairwise.h"

#include <algorithm>
#include <numeric>

namespace sparsemla::harness {

namespace {

constexpr int undecided = -1;

/// Which pairs have not met yet. Values are numbered through all parameters.
class Pairs {
   public:
    explicit Pairs(const std::vector<int>& sizes) : first_(sizes.size() + 1, 0) {
        std::partial_sum(sizes.begin(), sizes.end(), first_.begin() + 1);
        const auto values = static_cast<std::size_t>(first_.back());
        open_.assign(values * values, false);
        for (std::size_t a = 0; a < sizes.size(); ++a)
            for (std::size_t b = 0; b < sizes.size(); ++b)
                for (int i = 0; i < sizes[a] && a != b; ++i)
                    for (int j = 0; j < sizes[b]; ++j) open_[index(a, i, b, j)] = true;
    }

    bool open(std::size_t a, int i, std::size_t b, int j) const { return open_[index(a, i, b, j)]; }

    /// How many open pairs the value would close with the decided ones.
    int gain(const std::vector<int>& combination, std::size_t parameter, int value) const {
        int pairs = 0;
        for (std::size_t b = 0; b < combination.size(); ++b)
            if (combination[b] != undecided && open(parameter, value, b, combination[b])) ++pairs;
        return pairs;
    }

    void close(const std::vector<int>& combination) {
        for (std::size_t a = 0; a < combination.size(); ++a)
            for (std::size_t b = 0; b < combination.size(); ++b)
                open_[index(a, combination[a], b, combination[b])] = false;
    }

   private:
    std::size_t index(std::size_t a, int i, std::size_t b, int j) const {
        return static_cast<std::size_t>(first_[a] + i) * static_cast<std::size_t>(first_.back()) +
               static_cast<std::size_t>(first_[b] + j);
    }

    std::vector<int> first_;
    std::vector<bool> open_;
};

/// A combination that has the given pair decided: the others take, one after another, the value that closes most
/// pairs; among equals the choice moves on with `turn`, so that no value is favoured.
std::vector<int> complete(const Pairs& pairs, const std::vector<int>& sizes, std::vector<int> combination, int turn) {
    for (std::size_t parameter = 0; parameter < sizes.size(); ++parameter) {
        if (combination[parameter] != undecided) continue;
        int best = undecided;
        int best_gain = -1;
        for (int i = 0; i < sizes[parameter]; ++i) {
            const int value = (i + turn) % sizes[parameter];
            const int gain = pairs.gain(combination, parameter, value);
            if (gain <= best_gain) continue;
            best = value;
            best_gain = gain;
        }
        combination[parameter] = best;
    }
    return combination;
}

}  // namespace

std::vector<std::vector<int>> pairwise_cover(const std::vector<int>& sizes) {
    Pairs pairs(sizes);
    std::vector<std::vector<int>> cover;
    // Parameters with many values come first: their pairs decide how long the cover is.
    std::vector<std::size_t> order(sizes.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return sizes[a] > sizes[b]; });
    for (std::size_t x = 0; x < order.size(); ++x)
        for (std::size_t y = x + 1; y < order.size(); ++y)
            for (int i = 0; i < sizes[order[x]]; ++i)
                for (int j = 0; j < sizes[order[y]]; ++j) {
                    if (!pairs.open(order[x], i, order[y], j)) continue;
                    std::vector<int> combination(sizes.size(), undecided);
                    combination[order[x]] = i;
                    combination[order[y]] = j;
                    cover.push_back(complete(pairs, sizes, combination, static_cast<int>(cover.size())));
                    pairs.close(cover.back());
                }
    return cover;
}

}  // namespace sparsemla::harness
