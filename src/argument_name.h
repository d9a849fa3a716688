// An argument's place in a call, put into words only where a message needs them.
#pragma once

#include <cstdint>
#include <string>

namespace sparsemla::detail {

/// ArgumentName("args.sources")[1] + ".cache" reads "args.sources[1].cache". Conversions and checks of every call pass
/// such names on, and a call allocates nothing. What a name is made of must outlive it, as the parts of one expression
/// do until its end.
class ArgumentName {
   public:
    ArgumentName(const char* text) : text_(text) {}

    ArgumentName operator[](std::int64_t element) const {
        ArgumentName name("");
        name.before_ = this;
        name.element_ = element;
        return name;
    }
    friend ArgumentName operator+(const ArgumentName& before, const char* text) {
        ArgumentName name(text);
        name.before_ = &before;
        return name;
    }

    std::string text() const {
        std::string text = before_ != nullptr ? before_->text() : std::string();
        if (element_ >= 0) text += '[' + std::to_string(element_) + ']';
        return text + text_;
    }

   private:
    const ArgumentName* before_ = nullptr;
    const char* text_;
    std::int64_t element_ = -1;
};

}  // namespace sparsemla::detail
