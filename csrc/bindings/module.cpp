// The extension module. A class is bound before what takes it: signatures name it then.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "The engine of pipedream2bw.";
  pd2::bind_schedule(module);
  pd2::bind_plan(module);
  pd2::bind_shared_memory(module);
  pd2::bind_fault(module);
  pd2::bind_stage(module);
  pd2::bind_channels(module);
  pd2::bind_losses(module);
  pd2::bind_clipping(module);
  pd2::bind_hooks(module);
  pd2::bind_forward(module);
  pd2::bind_executor(module);
}
