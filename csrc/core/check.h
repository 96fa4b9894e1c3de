// Errors: what a user did wrong is a ValueError, a broken invariant a std::logic_error.

#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace pd2 {

// A mistake in what the user gave. Its text states the rule and both values, for example
// "num_microbatches: 2, num_stages: 4: 2bw needs num_microbatches >= num_stages".
// Python sees it as ValueError.
class ValueError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace detail {

// Appends what a stream would write. Out of line, because a stream in every check makes compiling
// slow.
void append(std::string& text, double part);

template <typename Part>
void append_part(std::string& text, const Part& part) {
  if constexpr (std::is_same_v<Part, bool>) {
    text += part ? "true" : "false";
  } else if constexpr (std::is_same_v<Part, char>) {
    text += part;
  } else if constexpr (std::is_same_v<Part, double>) {
    append(text, part);
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    text += std::string_view(part);
  } else if constexpr (std::is_integral_v<Part> && sizeof(Part) > 1) {
    text += std::to_string(part);
  } else {
    std::ostringstream stream;
    stream << part;
    text += stream.view();
  }
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_part(text, parts), ...);
  return text;
}

[[noreturn]] void throw_value_error(const std::string& message);
[[noreturn]] void throw_assertion(const char* file, int line, std::string_view expression,
                                  const std::string& message);

}  // namespace detail

}  // namespace pd2

// PD2_CHECK(m >= d, "num_microbatches: ", m, ...): throws pd2::ValueError with all parts
// streamed together. The parts are evaluated only on failure.
#define PD2_CHECK(condition, ...)                                           \
  do {                                                                      \
    if (!(condition)) [[unlikely]] {                                        \
      ::pd2::detail::throw_value_error(::pd2::detail::concat(__VA_ARGS__)); \
    }                                                                       \
  } while (false)

// For invariants only: throws std::logic_error with file, line, the expression and the parts.
#define PD2_ASSERT(condition, ...)                                        \
  do {                                                                    \
    if (!(condition)) [[unlikely]] {                                      \
      ::pd2::detail::throw_assertion(__FILE__, __LINE__, #condition,      \
                                     ::pd2::detail::concat(__VA_ARGS__)); \
    }                                                                     \
  } while (false)
