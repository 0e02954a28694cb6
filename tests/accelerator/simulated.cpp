// The operators of the simulated accelerator, and its Python interface. device.py says what is modelled and what is not.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include "collectives.h"

PYBIND11_DECLARE_HOLDER_TYPE(T, c10::intrusive_ptr<T>, true)

namespace {

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           dtype.value_or(at::get_default_dtype_as_scalartype()));
}

// Run the late work of the current stream, and all that it waits for, before a kernel reads the results.
void run_what_is_needed() { run_late(point_of(current()).needs); }

// A late copy: from pinned memory, to pinned memory, or between tensors of the device. On the default stream, a copy to
// pinned memory reads its source now and writes later. So later kernels need not wait for it.
void copy_late(const Tensor& from, const Tensor& to, const std::string& what) {
  bool out = !on_device(to), in = !on_device(from), snapshot = out && is_default(current());
  Range source = range_of(from), target = range_of(to);
  if (in || out) run_what_touches(in ? source : target);
  if (snapshot) run_what_is_needed();
  Tensor a = on_host(from), b = on_host(to);
  if (snapshot) a = a.clone();
  Guarded guard(state);
  begin(current(), what, {from}, {to});
  // A host that reads too early finds NaN.
  if (out && to.is_contiguous()) memset((void*)target.low, 0xFF, target.high - target.low);
  if (in) {
    auto content = std::string((char*)source.low, source.high - source.low);
    loans.push_back({{source, current(), streams[current()].before.at(current()), false, what}, std::move(content)});
  }
  enqueue(current(), !snapshot, {source, target}, [a, b] { b.copy_(a); });
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool in = !on_device(from), out = !on_device(to);
  std::string what = in ? "a copy from the host" : out ? "a copy to the host" : "a copy";
  bool is_late = in || out ? non_blocking && is_pinned((in ? from : to).const_data_ptr()) : !is_default(current());
  if (!to.numel()) return to;
  c10::DeviceGuard on(out ? from.device() : to.device());
  if (is_late) {
    copy_late(from, to, what);
    return to;
  }
  run_what_is_needed();
  if (in || out) run_what_touches(range_of(in ? from : to));
  {
    Guarded guard(state);
    begin(current(), what, {from}, {to});
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  on_host(to).copy_(on_host(from));
  // A real device has read pageable memory into a buffer of its own when the call returns.
  if (out || (in && !non_blocking)) wait_on_host(point_of(current()));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  c10::DeviceGuard on(tensor.device());
  {
    Guarded guard(state);
    begin(current(), "item", {tensor}, {});
  }
  wait_on_host(point_of(current()));
  return at::_local_scalar_dense(on_host(tensor));
}

// The CPU's kernel takes floating-point numbers only, and GPUs count integers too.
Tensor histc(const Tensor& values, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  c10::DeviceGuard on(values.device());
  run_what_is_needed();
  {
    Guarded guard(state);
    begin(current(), "histc", {values}, {});
  }
  auto counts = at::histc(on_host(values).to(at::kDouble), bins, low, high).to(values.scalar_type());
  return counts.to(values.device());
}

void record_stream(Tensor& tensor, c10::Stream stream) {
  device_memory.recordStream(tensor.storage().data_ptr(), stream);
}

// 0: attention made of plain operators.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

// One call of an operator's CPU kernel, on the memory of tensors of the device.
struct Call {
  const c10::FunctionSchema& schema;
  torch::jit::Stack& stack;
  size_t first;  // position of the first argument in the stack
  std::vector<c10::IValue> given;
  std::vector<Tensor> reads, writes, stand_ins, originals;

  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : schema(op.schema()), stack(stack), first(stack.size() - schema.arguments().size()),
        given(stack.begin() + (int64_t)first, stack.end()) {
    for (size_t i = 0; i < given.size(); i++) {
      auto* alias = schema.arguments()[i].alias_info();
      stack[first + i] = argument(given[i], alias && alias->isWrite());
    }
  }

  // The device of the tensors; without tensors, the one that the call names, or the current one.
  c10::Device device() const {
    if (!originals.empty()) return originals[0].device();
    for (auto& each : given)
      if (each.isDevice() && each.toDevice().has_index()) return each.toDevice();
    return Guard().getDevice();
  }

  c10::IValue argument(const c10::IValue& value, bool writes) {
    if (value.isTensor()) return stand_in(value.toTensor(), writes);
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(stand_in(each, writes));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
        list.push_back(each ? std::optional<Tensor>(stand_in(*each, writes)) : each);
      return list;
    }
    return value;
  }

  Tensor stand_in(const Tensor& tensor, bool is_written) {
    if (!on_device(tensor)) return tensor;
    (is_written ? writes : reads).push_back(tensor);
    TORCH_CHECK(originals.empty() || originals[0].device() == tensor.device(), schema.name(), ": tensors of ",
                originals[0].device(), " and of ", tensor.device());
    // The kernel decides on the size of an `out` without elements.
    bool to_be_sized = is_written && !tensor.numel();
    auto made = to_be_sized ? at::empty({0}, at::TensorOptions().dtype(tensor.dtype())) : on_host(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    originals.push_back(tensor);
    stand_ins.push_back(made);
    return made;
  }

  // Replace the kernel's results by tensors of the device. Returns whether there were other results than tensors.
  bool take_results() {
    bool values = false;
    size_t count = schema.returns().size(), at = stack.size() - count;
    for (size_t i = 0; i < count; i++) {
      auto& slot = stack[at + i];
      if (slot.isTensor()) {
        slot = result(slot.toTensor());
      } else if (slot.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor& each : slot.toTensorVector()) list.push_back(result(each));
        slot = list;
      } else {
        values = values || !slot.isNone();
      }
    }
    return values;
  }

  Tensor result(const Tensor& made) {
    if (!made.defined() || on_device(made)) return made;
    for (size_t i = 0; i < stand_ins.size(); i++) {
      if (made.is_same(stand_ins[i])) {
        if (originals[i].sizes() != made.sizes()) fill(at::native::resize_(originals[i], made.sizes()), made);
        return originals[i];
      }
      if (made.numel() && made.storage().data() == stand_ins[i].storage().data())  // a view
        return at::native::as_strided_tensorimpl(originals[i], made.sizes(), made.strides(),
                                                 originals[i].storage_offset() + made.storage_offset());
    }
    auto kept = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, device(), {});
    fill(kept, made);
    return kept;
  }

  void fill(const Tensor& kept, const Tensor& made) {
    on_host(kept).copy_(made);
    Guarded guard(state);
    begin(current(), schema.name(), {}, {kept});
  }
};

void call_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, *stack);
  c10::DeviceGuard on(call.device());
  run_what_is_needed();
  {
    Guarded guard(state);
    begin(current(), call.schema.name(), call.reads, call.writes);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (call.take_results()) wait_on_host(point_of(current()));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("histc", histc);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", choose_attention);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("resize_", at::native::resize_);
  library.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", at::native::set_);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  // CPUs and GPUs have kernels for these. Otherwise torch would compose them of other operations, with temporary tensors.
  for (const char* name : {"mish_backward", "native_channel_shuffle", "silu_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_on_host>());
}

}  // namespace

PYBIND11_MODULE(simulated, module) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  using released = pybind11::call_guard<pybind11::gil_scoped_release>;
  module.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int64_t milliseconds) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Collectives>(gloo, milliseconds));
  });
  module.def("register_memory", &register_memory, released());
  module.def("unregister_memory", &unregister_memory, released());
  module.def("go_on_if_idle", &go_on_if_idle, released());
  module.def("pending", [] { return late.size(); }, released());
  module.def("waits", [] { return host_waits; }, released());
  module.def("mistakes", [] {
    Guarded guard(state);
    settle_loans([](const Loan&) { return false; });
    auto found = std::move(mistakes);
    mistakes.clear();
    return found;
  }, released());
  module.def("fail_collective", [](int after) { collectives_before_failure = after; }, released());
  module.def("set_limit", [](size_t bytes) { limit = bytes; }, released());
}
