// Division that rounds down for numbers below 0, too: the divisor is above 0.

#pragma once

namespace pd2 {

constexpr int floor_div(int a, int b) { return a / b - (a % b < 0 ? 1 : 0); }
constexpr int floor_mod(int a, int b) { return a - floor_div(a, b) * b; }

}  // namespace pd2
