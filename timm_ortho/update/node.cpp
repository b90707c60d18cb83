// The autograd function of timm_ortho/update/gradient.py's KernelUpdate in C++, see node.py. The backward pass calls
// Python for everything that is not plain eager code with dense, aligned gradients.
#include <dlfcn.h>
#include <torch/extension.h>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Parameter = std::optional<Tensor>;

using Driver = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

// A compiled kernel. `values` has one number for each parameter. Pointers are filled in at a launch: `slots` has the
// index of their tensor, and -1 for other parameters.
struct Kernel {
  int64_t function, programs, threads, shared;
  std::vector<int64_t> values;
  std::vector<int> slots;

  void launch(const std::vector<Tensor>& tensors, c10::Device device) const {
    static const auto driver = reinterpret_cast<Driver>(dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuLaunchKernel"));
    const c10::OptionalDeviceGuard guard(device);
    c10::SmallVector<int64_t, 32> filled(values.begin(), values.end());
    filled.append(2, 0);  // two pointers to scratch memory, which these kernels do not use
    c10::SmallVector<void*, 32> pointers;
    for (size_t i = 0; i < filled.size(); ++i) {
      if (i < slots.size() && slots[i] >= 0) {
        filled[i] = reinterpret_cast<int64_t>(tensors[slots[i]].data_ptr());
      }
      pointers.push_back(&filled[i]);
    }
    void* stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    const int status = driver(reinterpret_cast<void*>(function), programs, 1, 1, threads, 1, 1, shared, stream,
                              pointers.data(), nullptr);
    TORCH_CHECK(status == 0, "a kernel of timm_ortho could not be launched: CUDA driver error ", status);
  }
};

// A plan of kernels.py, or of norm.py if `with_norm`.
struct Plan {
  py::object python;
  Kernel forward, backward;
  bool recover, with_norm;
  at::ScalarType dtype, branch_dtype, norm_dtype;
  std::vector<int64_t> sums_size, sums_stride, moments_size, parts_size;
};

static bool aligned(const std::vector<Tensor>& tensors) {
  uintptr_t addresses = 0;
  for (const Tensor& tensor : tensors) {
    if (tensor.defined()) addresses |= reinterpret_cast<uintptr_t>(tensor.data_ptr());
  }
  return addresses % 16 == 0;
}

static variable_list by_python(AutogradContext* ctx, const Plan& plan, const variable_list& saved, const variable_list& grads) {
  const py::gil_scoped_acquire acquire;
  py::list tensors[2];
  for (const Tensor& tensor : saved) {
    tensors[0].append(tensor.defined() ? py::cast(tensor) : py::none());
  }
  for (const Tensor& tensor : grads) {
    tensors[1].append(tensor.defined() ? py::cast(tensor) : py::none());
  }
  const py::tuple needed = py::make_tuple(ctx->needs_input_grad(0), ctx->needs_input_grad(1));
  const py::tuple found = plan.python.attr("backward")(py::tuple(tensors[0]), py::tuple(tensors[1]), needed);
  variable_list results(5);  // in Python, the third input is the plan
  const size_t places[] = {0, 1, 4, 2, 3};
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].is_none()) results[places[i]] = found[i].cast<Tensor>();
  }
  return results;
}

struct Node : torch::autograd::Function<Node> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& f, const Parameter& weight,
                               const Parameter& bias, int64_t address) {
    const Plan& plan = *reinterpret_cast<Plan*>(address);
    const Tensor w = weight.value_or(Tensor()), c = bias.value_or(Tensor());
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto numbers = x.options().dtype(at::kFloat);
    const Tensor y = at::empty_like(x, x.options().dtype(plan.dtype));
    const Tensor s = at::empty_strided(plan.sums_size, plan.sums_stride, numbers), n = at::empty_like(s);
    ctx->saved_data["plan"] = address;
    ctx->set_materialize_grads(false);
    if (!plan.with_norm) {
      plan.forward.launch({x, f, w, c, y, s, n}, x.device());
      ctx->save_for_backward({x, plan.recover ? y : f, s, n});
      return {y, s};
    }
    const Tensor h = at::empty_like(x, x.options().dtype(plan.norm_dtype)), moments = at::empty(plan.moments_size, numbers);
    plan.forward.launch({x, f, w, c, y, s, n, h, moments}, x.device());
    ctx->save_for_backward({x, y, s, n, w, moments});
    return {y, h, s};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Plan& plan = *reinterpret_cast<Plan*>(ctx->saved_data["plan"].toInt());
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &kept = saved[1], &s = saved[2], &n = saved[3];
    bool plain = !at::GradMode::is_enabled() && c10::impl::TorchDispatchModeTLS::stack_len() == 0 && !grads.back().defined();
    for (size_t i = 0; i + 1 < grads.size(); ++i) {
      plain = plain && grads[i].defined() && grads[i].key_set() == s.key_set();  // no subclass, no transform
      if (plain && grads[i].strides() != x.strides()) {
        grads[i] = at::empty_strided(x.sizes(), x.strides(), grads[i].options()).copy_(grads[i]);
      }
    }
    if (!plain || !aligned(saved) || !aligned(grads)) return by_python(ctx, plan, saved, grads);
    const Tensor grad_x = at::empty_like(x), grad_f = at::empty_like(x, x.options().dtype(plan.branch_dtype));
    if (!plan.with_norm) {
      plan.backward.launch({x, kept, grads[0], s, n, grad_x, grad_f}, x.device());
      return {grad_x, grad_f, {}, {}, {}};
    }
    const Tensor &w = saved[4], &moments = saved[5];
    const Tensor parts = w.defined() ? at::empty(plan.parts_size, moments.options()) : Tensor();
    plan.backward.launch({x, kept, grads[0], grads[1], s, n, w, moments, grad_x, grad_f, parts}, x.device());
    if (!w.defined()) return {grad_x, grad_f, {}, {}, {}};
    const Tensor sums = parts.sum(1);
    const Tensor grad_c = ctx->needs_input_grad(3) ? sums[1].to(w.scalar_type()) : Tensor();
    return {grad_x, grad_f, sums[0].to(w.scalar_type()), grad_c, {}};
  }
};

// Return the outputs of KernelUpdate, or None if tensors are not aligned.
static py::object apply(const Plan& plan, const Tensor& x, const Tensor& f, const Parameter& w, const Parameter& c) {
  if (!aligned({x, f, w.value_or(Tensor()), c.value_or(Tensor())})) return py::none();
  variable_list outputs;
  {
    const py::gil_scoped_release release;
    outputs = Node::apply(x, f, w, c, reinterpret_cast<int64_t>(&plan));
  }
  return py::tuple(py::cast(outputs));
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Kernel>(m, "Kernel")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, std::vector<int64_t>, std::vector<int>>());
  py::class_<Plan>(m, "Plan")
      .def(py::init<py::object, Kernel, Kernel, bool, bool, at::ScalarType, at::ScalarType, at::ScalarType,
                    std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>())
      .def("__call__", &apply, py::arg("x"), py::arg("f"), py::arg("w") = py::none(), py::arg("c") = py::none());
}
