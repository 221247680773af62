// Checks of arguments, without C++ streams: a process that has loaded CUDA's libraries may resolve symbols in another
// C++ library than the one that this is linked to, and streams then crash.
#pragma once
#include <stdexcept>
#include <string>
#include <type_traits>

namespace modelcenter {

inline void append(std::string& text, const char* part) { text += part; }

template <class Number, class = std::enable_if_t<std::is_integral_v<Number>>>
void append(std::string& text, Number part) {
  text += std::to_string(part);
}

// Throws std::runtime_error with the name of the function and the parts, concatenated.
template <class... Parts>
[[noreturn]] void fail(const char* function, const Parts&... parts) {
  std::string text = function;
  text += ": ";
  (append(text, parts), ...);
  throw std::runtime_error(text);
}

}  // namespace modelcenter

#define MC_CHECK(condition, ...) ((condition) ? (void)0 : ::modelcenter::fail(__func__, __VA_ARGS__))
