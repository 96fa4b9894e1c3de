// torch.autocast("checked"): which operators run in which precision, by torch's own lists.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace pd2 {

using namespace at;  // as the lists name types

// Operators of no list run as they are.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define PD2_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define PD2_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PD2_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PD2_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(PD2_LOWER)
  AT_FORALL_FP32(PD2_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(PD2_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PD2_PROMOTE)
}

}  // namespace pd2
