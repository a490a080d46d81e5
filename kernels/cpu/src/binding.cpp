// The module kernels.cpu._native: memory comes in as addresses, shapes are checked in Python (kernels/cpu/ops.py).
//
// Every call lets go of the interpreter's lock while it computes. A Machine is one set of threads and working memory; calls on
// it wait for each other.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "memory.h"

namespace py = pybind11;
using namespace tandem;

namespace {

using Address = uintptr_t;
template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// --- instruction sets ----------------------------------------------------------------------------------------------------

bool can_run(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (name == "avx2") return has_avx2;
  if (name == "avx512") return has_avx512;
  if (name == "avx512_bf16") {
    return has_avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  }
#endif
  return name == "scalar" || name == "neon";
}

// What this build has and this CPU can run, best first.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  const std::vector<const Kernels*> built = {
#if defined(TANDEM_HAS_AVX512_BF16)
      kernels_avx512_bf16(),
#endif
#if defined(TANDEM_HAS_AVX512)
      kernels_avx512(),
#endif
#if defined(TANDEM_HAS_AVX2)
      kernels_avx2(),
#endif
#if defined(TANDEM_HAS_NEON)
      kernels_neon(),
#endif
#if defined(TANDEM_HAS_SCALAR)
      kernels_scalar(),
#endif
  };
  for (const Kernels* kernels : built) {
    if (can_run(kernels->name)) found.push_back(kernels);
  }
  return found;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& find_kernels(const std::string& name) {
  for (const Kernels* kernels : available()) {
    if (name == kernels->name) return *kernels;
  }
  throw std::invalid_argument("no kernels for the instruction set '" + name + "' on this CPU");
}

// --- what Python holds -------------------------------------------------------------------------------------------------------

struct Weight {
  Weight(const Kernels& kernels, Format format, int num_out, int num_in, int group_size, bool has_offsets, bool is_exact)
      : data(kernels.packed_bytes(format, num_out, num_in, group_size)),
        scales(format == Format::kInt8 || format == Format::kInt4 ? scale_bytes(kernels, num_out, num_in, group_size) : 0),
        offsets(has_offsets ? scale_bytes(kernels, num_out, num_in, group_size) : 0),
        linear{format, num_out, num_in, group_size, is_exact, data.data(), scales.data(), offsets.data(), nullptr} {}

  static int64_t scale_bytes(const Kernels& kernels, int num_out, int num_in, int group_size) {
    const int64_t padded = (num_out + kernels.panel_width - 1) / kernels.panel_width * kernels.panel_width;
    return group_size > 0 ? padded * (num_in / group_size) * 2 : padded * 4;
  }
  int64_t num_bytes() const { return data.size() + scales.size() + offsets.size(); }
  Linear with_bias(Address bias) const {
    Linear found = linear;
    found.bias = at<const float>(bias);
    return found;
  }

  Memory data, scales, offsets;
  Linear linear;
};

using IntArray = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

// Keeps the arrays that it points into.
struct Rows {
  Rows(IntArray first_rows, IntArray contexts, IntArray first_blocks, IntArray block_ids, IntArray write_blocks,
       IntArray write_offsets)
      : kept{first_rows, contexts, first_blocks, block_ids, write_blocks, write_offsets} {
    batch.num_rows = static_cast<int>(write_blocks.size());
    batch.num_sequences = static_cast<int>(contexts.size());
    batch.first_rows = first_rows.data();
    batch.contexts = contexts.data();
    batch.first_blocks = first_blocks.data();
    batch.block_ids = block_ids.data();
    batch.write_blocks = write_blocks.data();
    batch.write_offsets = write_offsets.data();
  }
  std::vector<IntArray> kept;
  Batch batch{};
};

struct LayerWeights {
  Layer layer{};
  std::vector<std::shared_ptr<Weight>> kept;
};

// One set of threads and working memory, for one instruction set.
class Machine {
 public:
  Machine(const std::string& instruction_set, int num_threads)
      : kernels_(find_kernels(instruction_set)), team_(std::make_unique<Team>(num_threads)) {}

  const Kernels& kernels() const { return kernels_; }
  int num_threads() const { return team_->num_threads(); }

  template <typename Function, typename... Args>
  void run(Function function, Args&&... args) {
    // Taken back outside of any destructor: where the interpreter ends meanwhile, that ends this thread by unwinding it,
    // and a destructor that is unwound (gil_scoped_release's) ends the process with an abort.
    PyThreadState* const state = PyEval_SaveThread();
    std::exception_ptr error;
    try {
      const std::lock_guard<std::mutex> one_at_a_time(mutex_);
      function(Context{*team_, workspace_}, std::forward<Args>(args)...);
    } catch (...) {
      error = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (error) std::rethrow_exception(error);
  }

 private:
  const Kernels& kernels_;
  std::unique_ptr<Team> team_;
  Workspace workspace_;
  std::mutex mutex_;
};

std::shared_ptr<Weight> make_weight(const Machine& machine, Format format, int num_out, int num_in, int group_size,
                                    bool is_exact, Address values, Address scales, Address offsets) {
  auto weight = std::make_shared<Weight>(machine.kernels(), format, num_out, num_in, group_size, offsets != 0, is_exact);
  const py::gil_scoped_release released;
  machine.kernels().pack(weight->linear, WeightSource{at<const void>(values), at<const float>(scales), at<const float>(offsets)});
  return weight;
}

void bind_structs(py::module_& m) {
  py::enum_<Format>(m, "Format")
      .value("float32", Format::kFloat32)
      .value("bfloat16", Format::kBFloat16)
      .value("int8", Format::kInt8)
      .value("int4", Format::kInt4);
  py::enum_<KVType>(m, "KVType")
      .value("float32", KVType::kFloat32)
      .value("bfloat16", KVType::kBFloat16)
      .value("float16", KVType::kFloat16)
      .value("fp8_e4m3", KVType::kFloat8)
      .value("int8", KVType::kInt8);
  py::class_<Weight, std::shared_ptr<Weight>>(m, "Weight").def_property_readonly("num_bytes", &Weight::num_bytes);
  py::class_<Rows>(m, "Rows")
      .def(py::init<IntArray, IntArray, IntArray, IntArray, IntArray, IntArray>(), py::arg("first_rows"), py::arg("contexts"),
           py::arg("first_blocks"), py::arg("block_ids"), py::arg("write_blocks"), py::arg("write_offsets"));
  py::class_<Pool>(m, "Pool")
      .def(py::init([](Address data, KVType type, int num_layers, int num_kv_heads, int block_size, int head_dim,
                       Address key_scales, Address value_scales) {
             return Pool{at<void>(data), type, num_layers, num_kv_heads, block_size, head_dim, at<const float>(key_scales),
                         at<const float>(value_scales)};
           }),
           py::arg("data"), py::arg("type"), py::arg("num_layers"), py::arg("num_kv_heads"), py::arg("block_size"),
           py::arg("head_dim"), py::arg("key_scales") = 0, py::arg("value_scales") = 0);
  py::class_<AttentionOptions>(m, "AttentionOptions")
      .def(py::init<int, float, float, int>(), py::arg("num_heads"), py::arg("scale"), py::arg("soft_cap") = 0.0f,
           py::arg("window") = 0);
  py::class_<LayerWeights, std::shared_ptr<LayerWeights>>(m, "Layer")
      .def(py::init([](int number, int hidden_size, int inner_size, float eps, Address input_norm, Address post_norm,
                       std::shared_ptr<Weight> qkv, std::shared_ptr<Weight> out, std::shared_ptr<Weight> gate_up,
                       std::shared_ptr<Weight> down, std::vector<Address> biases, AttentionOptions attention) {
             auto made = std::make_shared<LayerWeights>();
             made->layer = Layer{number,
                                 hidden_size,
                                 inner_size,
                                 eps,
                                 at<const float>(input_norm),
                                 at<const float>(post_norm),
                                 qkv->with_bias(biases.at(0)),
                                 out->with_bias(biases.at(1)),
                                 gate_up->with_bias(biases.at(2)),
                                 down->with_bias(biases.at(3)),
                                 attention};
             made->kept = {qkv, out, gate_up, down};
             return made;
           }),
           py::arg("number"), py::arg("hidden_size"), py::arg("inner_size"), py::arg("eps"), py::arg("input_norm"),
           py::arg("post_norm"), py::arg("qkv"), py::arg("out"), py::arg("gate_up"), py::arg("down"), py::arg("biases"),
           py::arg("attention"));
}

void bind_machine(py::module_& m) {
  py::class_<Machine>(m, "Machine")
      .def(py::init<const std::string&, int>(), py::arg("instruction_set"), py::arg("num_threads"))
      .def_property_readonly("instruction_set", [](const Machine& self) { return self.kernels().name; })
      .def_property_readonly("panel_width", [](const Machine& self) { return self.kernels().panel_width; })
      .def_property_readonly("has_bfloat16", [](const Machine& self) { return self.kernels().has_bfloat16; })
      .def_property_readonly("num_threads", &Machine::num_threads)
      .def("pack", &make_weight, py::arg("format"), py::arg("num_out"), py::arg("num_in"), py::arg("group_size"),
           py::arg("is_exact"), py::arg("values"), py::arg("scales") = 0, py::arg("offsets") = 0)
      .def("linear",
           [](Machine& self, const Weight& weight, Address bias, Address x, int num_rows, Address out) {
             self.run(self.kernels().linear, weight.with_bias(bias), at<const float>(x), num_rows, at<float>(out));
           })
      .def("rms_norm",
           [](Machine& self, Address x, Address weight, float eps, int num_rows, int size, Address out) {
             self.run(self.kernels().rms_norm, at<const float>(x), at<const float>(weight), eps, num_rows, size, at<float>(out));
           })
      .def("add_rms_norm",
           [](Machine& self, Address x, Address residual, Address weight, float eps, int num_rows, int size, Address out) {
             self.run(self.kernels().add_rms_norm, at<const float>(x), at<float>(residual), at<const float>(weight), eps,
                      num_rows, size, at<float>(out));
           })
      .def("rotary",
           [](Machine& self, Address x, int64_t row_stride, Address cos, Address sin, int num_rows, int num_heads,
              int head_dim, Address out) {
             self.run(self.kernels().rotary, at<const float>(x), row_stride, at<const float>(cos), at<const float>(sin),
                      num_rows, num_heads, head_dim, at<float>(out));
           })
      .def("silu_and_mul",
           [](Machine& self, Address x, int num_rows, int size, Address out) {
             self.run(self.kernels().silu_and_mul, at<const float>(x), num_rows, size, at<float>(out));
           })
      .def("write_kv",
           [](Machine& self, Address key, int64_t key_stride, Address value, int64_t value_stride, const Pool& pool, int layer,
              const Rows& rows) {
             self.run(self.kernels().write_kv, at<const float>(key), key_stride, at<const float>(value), value_stride, pool,
                      layer, rows.batch);
           })
      .def("attention",
           [](Machine& self, Address query, int64_t query_stride, const Pool& pool, int layer, const Rows& rows,
              const AttentionOptions& options, Address out) {
             self.run(self.kernels().attention, at<const float>(query), query_stride, pool, layer, rows.batch, options,
                      at<float>(out));
           })
      .def("top_k",
           [](Machine& self, Address x, int num_rows, int size, int k, Address values, Address ids) {
             self.run(self.kernels().top_k, at<const float>(x), num_rows, size, k, at<float>(values), at<int64_t>(ids));
           })
      .def("read_all",
           [](Machine& self, Address data, int64_t num_floats) {
             const py::gil_scoped_release released;
             return self.kernels().read_all(at<const float>(data), num_floats);
           })
      .def("multiply_all",
           [](Machine& self, Format format, int64_t rounds) {
             const py::gil_scoped_release released;
             return self.kernels().multiply_all(format, rounds);
           })
      .def("layer", [](Machine& self, const LayerWeights& weights, const Pool& pool, const Rows& rows, Address cos,
                       Address sin, Address residual) {
        self.run(self.kernels().layer, weights.layer, pool, rows.batch, at<const float>(cos), at<const float>(sin),
                 at<float>(residual));
      });
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The CPU kernels; kernels/cpu/ops.py is what to call.";
  m.def("instruction_sets", &instruction_sets, "What this CPU can run of what was built, best first.");
  m.def(
      "advise_huge_pages", [](Address data, int64_t num_bytes) { advise_huge_pages(at<void>(data), num_bytes); },
      "Asks for huge pages under this memory.");
  bind_structs(m);
  bind_machine(m);
}
