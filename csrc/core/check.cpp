#include "core/check.h"

namespace pd2::detail {

void append(std::string& text, double part) {
  std::ostringstream stream;
  stream << part;
  text += stream.view();
}

void throw_value_error(const std::string& message) { throw ValueError(message); }

void throw_assertion(const char* file, int line, std::string_view expression,
                     const std::string& message) {
  throw std::logic_error(concat(file, ":", line, ": broken invariant: ", expression,
                                message.empty() ? "" : ": ", message));
}

}  // namespace pd2::detail
