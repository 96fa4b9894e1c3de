// What a call throws, as text to compare with.

#pragma once

#include "core/check.h"

#include <string>

namespace pd2::testing {

// The message of the ValueError that the call throws; "" if it throws none. Other exceptions pass.
template <typename Call>
std::string value_error(Call&& call) {
  try {
    call();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "";
}

}  // namespace pd2::testing
