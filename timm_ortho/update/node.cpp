// The autograd function of timm_ortho/update/gradient.py's KernelUpdate in C++, see node.py. It takes only plain eager
// calls whose tensors equal those of an earlier call in everything but their addresses and numbers. The backward pass
// needs no Python, except for gradients that are not plain, dense and aligned, and for second derivatives.
#include <dlfcn.h>
#include <torch/extension.h>

#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Sizes = std::vector<int64_t>;
using Parameter = std::optional<Tensor>;
using Addresses = std::initializer_list<void*>;
using Driver = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

constexpr size_t MOST = 40;  // parameters of a kernel

// A compiled kernel. `values` has one number for each parameter. Pointers are filled in at a launch: `slots` has the
// index of their address, and -1 for other parameters.
struct Kernel {
  int64_t function, programs, threads, shared;
  Sizes values;
  std::vector<int> slots;

  void launch(Addresses addresses, c10::Device device) const {
    static const auto driver = reinterpret_cast<Driver>(dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuLaunchKernel"));
    const c10::OptionalDeviceGuard guard(device);
    int64_t filled[MOST] = {};  // the last two are pointers to scratch memory, which these kernels do not use
    void* pointers[MOST];
    for (size_t i = 0; i < values.size() + 2; ++i) {
      if (i < values.size()) {
        filled[i] = slots[i] < 0 ? values[i] : reinterpret_cast<int64_t>(addresses.begin()[slots[i]]);
      }
      pointers[i] = &filled[i];
    }
    void* stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    const int status = driver(reinterpret_cast<void*>(function), programs, 1, 1, threads, 1, 1, shared, stream, pointers,
                              nullptr);
    TORCH_CHECK(status == 0, "a kernel of timm_ortho could not be launched: CUDA driver error ", status);
  }
};

// All that a call must have in common with an earlier call, for one of its tensors.
struct Kind {
  bool defined;
  c10::DispatchKeySet keys;  // a subclass, a transform or a lazy conjugation would have more keys
  Sizes sizes, strides;
  at::ScalarType dtype;
  c10::Device device;

  explicit Kind(const Tensor& t) : defined(t.defined()), device(at::kCPU) {
    if (!defined) return;
    keys = t.key_set(), sizes = t.sizes().vec(), strides = t.strides().vec(), dtype = t.scalar_type(), device = t.device();
  }

  bool is(const Tensor& t) const {
    if (!defined || !t.defined()) return defined == t.defined();
    return t.key_set() == keys && t.scalar_type() == dtype && t.device() == device && t.sizes() == sizes &&
           t.strides() == strides && !t._fw_grad(0).defined();
  }
};

static int autocast_dtype(c10::DeviceType type) {
  return at::autocast::is_autocast_enabled(type) ? static_cast<int>(at::autocast::get_autocast_dtype(type)) : -1;
}

static uintptr_t address(const Tensor& t) { return t.defined() ? reinterpret_cast<uintptr_t>(t.data_ptr()) : 0; }

// A plan of plan.py. The sums s and n and the moments of the norm, which follow n, share a tensor: `projections`
// numbers each.
struct Plan {
  py::object python;
  Kernel forward, backward;
  bool recover, with_norm;
  at::ScalarType dtype, branch_dtype, norm_dtype;
  Sizes sums_size, sums_stride, parts_size;
  int64_t projections;
  std::vector<Kind> kinds;  // of x, f, w and c
  int autocast;

  bool takes(const Tensor* tensors[4]) const {
    for (size_t i = 0; i < 4; ++i) {
      if (!kinds[i].is(*tensors[i])) return false;
    }
    return !with_norm || autocast == autocast_dtype(kinds[0].device.type());  // the norm's result depends on autocast
  }

  int64_t padded() const { return (projections + 3) / 4 * 4; }  // s and n are aligned to 16 bytes
};

static variable_list by_python(AutogradContext* ctx, const Plan& plan, const variable_list& saved, const variable_list& grads) {
  const Tensor &x = saved[0], &kept = saved[1];
  Tensor f = kept;
  if (plan.recover) {
    {
      const at::NoGradGuard guard;
      const Tensor s = saved[2].as_strided(plan.sums_size, plan.sums_stride, 0);
      f = (kept - (1 - s) * x).to(plan.branch_dtype);
    }
    if (at::GradMode::is_enabled() && ctx->needs_input_grad(1)) {  // f becomes the branch output of the forward pass
      torch::autograd::impl::set_gradient_edge(f, kept.grad_fn()->next_edge(1));
    }
  }
  const py::gil_scoped_acquire acquire;
  py::list upstream;
  for (const Tensor& grad : grads) {
    upstream.append(grad.defined() ? py::cast(grad) : py::none());
  }
  upstream.append(py::none());  // the sums are no output here
  const py::object w = plan.with_norm && saved[3].defined() ? py::cast(saved[3]) : py::none();
  const py::tuple found = plan.python.attr("torch_gradients")(x, f, w, upstream);
  variable_list results(5);
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i].is_none()) results[i] = found[i].cast<Tensor>();
  }
  return results;
}

struct Node : torch::autograd::Function<Node> {
  static variable_list forward(AutogradContext* ctx, const Tensor& x, const Tensor& f, const Parameter& weight,
                               const Parameter& bias, int64_t plan_address) {
    const Plan& plan = *reinterpret_cast<Plan*>(plan_address);
    const Tensor w = weight.value_or(Tensor()), c = bias.value_or(Tensor());
    const at::AutoDispatchBelowADInplaceOrView below;
    const int64_t padded = plan.padded();
    const Tensor y = at::empty_like(x, x.options().dtype(plan.dtype));
    const Tensor sums = at::empty({(plan.with_norm ? 4 : 2) * padded}, x.options().dtype(at::kFloat));
    const Tensor h = plan.with_norm ? at::empty_like(x, x.options().dtype(plan.norm_dtype)) : Tensor();
    float* s = sums.data_ptr<float>();
    plan.forward.launch({x.data_ptr(), f.data_ptr(), w.defined() ? w.data_ptr() : nullptr, c.defined() ? c.data_ptr() : nullptr,
                         y.data_ptr(), s, s + padded, h.defined() ? h.data_ptr() : nullptr}, x.device());
    ctx->saved_data["plan"] = plan_address;
    ctx->set_materialize_grads(false);
    if (!plan.with_norm) {
      ctx->save_for_backward({x, plan.recover ? y : f, sums});
      return {y};
    }
    ctx->save_for_backward({x, y, sums, w});
    return {y, h};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Plan& plan = *reinterpret_cast<Plan*>(ctx->saved_data["plan"].toInt());
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &x = saved[0], &kept = saved[1], &sums = saved[2], w = plan.with_norm ? saved[3] : Tensor();
    const auto local = c10::impl::tls_local_dispatch_key_set();
    bool plain = !at::GradMode::is_enabled() && local.included_ == c10::default_included_set;
    uintptr_t addresses = address(x) | address(kept) | address(w);
    for (Tensor& grad : grads) {
      plain = plain && grad.defined() && grad.key_set() == sums.key_set();  // no subclass, no transform
      if (!plain) break;
      if (grad.strides() != x.strides()) grad = at::empty_strided(x.sizes(), x.strides(), grad.options()).copy_(grad);
      addresses |= address(grad);
    }
    if (!plain || addresses % 16) return by_python(ctx, plan, saved, grads);
    const Tensor grad_x = at::empty_like(x), grad_f = at::empty_like(x, x.options().dtype(plan.branch_dtype));
    float *s = sums.data_ptr<float>(), *n = s + plan.padded();
    if (!plan.with_norm) {
      plan.backward.launch({x.data_ptr(), kept.data_ptr(), grads[0].data_ptr(), s, n, grad_x.data_ptr(), grad_f.data_ptr()},
                           x.device());
      return {grad_x, grad_f, {}, {}, {}};
    }
    const Tensor parts = w.defined() ? at::empty(plan.parts_size, sums.options()) : Tensor();
    plan.backward.launch({x.data_ptr(), kept.data_ptr(), grads[0].data_ptr(), grads[1].data_ptr(), s, n,
                          w.defined() ? w.data_ptr() : nullptr, grad_x.data_ptr(), grad_f.data_ptr(),
                          w.defined() ? parts.data_ptr() : nullptr}, x.device());
    if (!w.defined()) return {grad_x, grad_f, {}, {}, {}};
    const Tensor of_parameters = parts.sum(1);
    const Tensor grad_c = plan.kinds[3].defined ? of_parameters[1].to(plan.kinds[3].dtype) : Tensor();
    return {grad_x, grad_f, of_parameters[0].to(w.scalar_type()), grad_c, {}};
  }
};

// The plans of calls that agree in everything but their tensors.
struct Plans {
  std::vector<std::unique_ptr<Plan>> plans;

  void add(Plan plan, const Tensor& x, const Tensor& f, const Parameter& w, const Parameter& c) {
    for (const Tensor& t : {x, f, w.value_or(Tensor()), c.value_or(Tensor())}) {
      plan.kinds.emplace_back(t);
    }
    plan.autocast = autocast_dtype(x.device().type());
    plans.push_back(std::make_unique<Plan>(std::move(plan)));
  }

  // Return y, or y and h, or None if Python must compute them.
  py::object call(py::handle x, py::handle f, py::handle w, py::handle c) {
    const auto local = c10::impl::tls_local_dispatch_key_set();
    if (!at::GradMode::is_enabled() || local.included_ != c10::default_included_set ||
        at::SavedTensorDefaultHooks::get_hooks(true)) {
      return py::none();
    }
    static const Tensor none;
    const Tensor* tensors[4];
    const py::handle handles[] = {x, f, w, c};
    bool needed = false;
    uintptr_t addresses = 0;
    for (size_t i = 0; i < 4; ++i) {
      if (handles[i].is_none()) {
        tensors[i] = &none;
        continue;
      }
      if (!THPVariable_CheckExact(handles[i].ptr())) return py::none();
      tensors[i] = &THPVariable_Unpack(handles[i].ptr());
      needed = needed || tensors[i]->requires_grad();
    }
    if (!needed) return py::none();
    for (const auto& plan : plans) {
      if (!plan->takes(tensors)) continue;
      for (const Tensor* t : tensors) {
        addresses |= address(*t);
      }
      if (addresses % 16) return py::none();
      const auto given = [&](size_t i) { return tensors[i]->defined() ? Parameter(*tensors[i]) : Parameter(); };
      const variable_list found = Node::apply(
          *tensors[0], *tensors[1], given(2), given(3), reinterpret_cast<int64_t>(plan.get()));
      return plan->with_norm ? py::object(py::make_tuple(found[0], found[1])) : py::cast(found[0]);
    }
    return py::none();
  }
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::class_<Kernel>(m, "Kernel")
      .def(py::init([](int64_t function, int64_t programs, int64_t threads, int64_t shared, Sizes values,
                       std::vector<int> slots) {
        TORCH_CHECK(values.size() + 2 <= MOST, "too many parameters");
        return Kernel{function, programs, threads, shared, std::move(values), std::move(slots)};
      }));
  py::class_<Plan>(m, "Plan")
      .def(py::init([](py::object python, Kernel forward, Kernel backward, bool recover, bool with_norm,
                       at::ScalarType dtype, at::ScalarType branch_dtype, at::ScalarType norm_dtype, Sizes sums_size,
                       Sizes sums_stride, Sizes parts_size, int64_t projections) {
        return Plan{std::move(python), std::move(forward), std::move(backward), recover, with_norm, dtype, branch_dtype,
                    norm_dtype, std::move(sums_size), std::move(sums_stride), std::move(parts_size), projections, {}, -1};
      }));
  py::class_<Plans>(m, "Plans").def(py::init<>()).def("add", &Plans::add).def("__call__", &Plans::call);
}
