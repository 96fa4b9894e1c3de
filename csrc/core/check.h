// Errors: what a user did wrong is a ValueError, a broken invariant a std::logic_error.

#pragma once

#include <cmath>
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

// Each appends what a stream would write. Out of line, because a stream in every check makes
// compiling slow.
void append(std::string& text, std::string_view part);
void append(std::string& text, const char* part);
void append(std::string& text, char part);
void append(std::string& text, bool part);
void append(std::string& text, long long part);
void append(std::string& text, unsigned long long part);
void append(std::string& text, double part);

template <typename Part>
void append_part(std::string& text, const Part& part) {
  if constexpr (std::is_same_v<Part, bool> || std::is_same_v<Part, char> ||
                std::is_same_v<Part, double> || std::is_convertible_v<Part, const char*>) {
    append(text, part);
  } else if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    append(text, std::string_view(part));
  } else if constexpr (std::is_integral_v<Part> && sizeof(Part) > 1) {
    using Widest = std::conditional_t<std::is_signed_v<Part>, long long, unsigned long long>;
    append(text, static_cast<Widest>(part));
  } else {
    std::ostringstream stream;
    stream << part;
    append(text, std::string_view(stream.view()));
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

// Throws ValueError, with the name streamed together of parts, unless the amount is one of seconds
// or bytes.
template <typename... Name>
void check_amount(double amount, const Name&... name) {
  if (std::isfinite(amount) && amount >= 0) [[likely]]
    return;
  detail::throw_value_error(detail::concat(name..., ": ", amount, ": must be finite and >= 0"));
}

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
