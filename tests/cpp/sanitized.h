// Whether a test runs under a sanitizer, ten to forty times as slow.

#pragma once

namespace pd2::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

}  // namespace pd2::testing
