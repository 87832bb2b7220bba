// One declaration per operator. An operator's arguments and results are each listed once, as an
// X-macro of FIELD(type, name) entries:
//
//   #define LINEAR_INPUTS(FIELD) FIELD(Tensor, x) FIELD(Tensor, W) FIELD(OptionalTensor, b)
//   FUSEDSEQ_DECLARE(LinearInputs, LINEAR_INPUTS)
//
// FUSEDSEQ_DECLARE makes a struct of these fields. A kernel is a function from such structs to such
// a struct; `define` derives the operator's schema from the kernel's type, and `boxed` derives the
// conversion from and to torch's stack of values. A field may itself be a declared struct; then the
// names of its fields get the outer field's name as a suffix (`layer W_ih` in a field named
// `first` becomes the argument `W_ih_first`).
//
// Names carry meaning. pyext/fusedseq/fused/schema.py and csrc/python/autograd_formulas.h read them
// from the schema of `<op>_backward` to connect it with `<op>`: an argument `d<output>` is the
// gradient of that output, an argument with the name of an input or of an output is that tensor,
// `needs` has bit i set where the i-th result is required, `outputs` is the list of all outputs,
// and a result `d<input>` is the gradient of that input. torch allows 64 arguments: an operator
// that would have nearly as many takes its outputs as that list.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fusedseq {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;
using Sizes = std::vector<int64_t>;

// A list of tensors that the operator writes to; ALIAS names the alias set in the schema.
template <char ALIAS>
struct MutatedTensors : Tensors {
  explicit MutatedTensors(Tensors&& t) : Tensors(std::move(t)) {}
};
template <class T>
constexpr bool is_mutated = std::is_base_of_v<Tensors, T> && !std::is_same_v<Tensors, T>;

namespace declaration {

template <class T, class = void>
struct IsStruct : std::false_type {};
template <class T>
struct IsStruct<T, std::void_t<typename T::Position>> : std::true_type {};

template <class T>
struct SchemaType;
template <>
struct SchemaType<Tensor> {
  static std::string name() { return "Tensor"; }
};
template <>
struct SchemaType<OptionalTensor> {
  static std::string name() { return "Tensor?"; }
};
template <>
struct SchemaType<Tensors> {
  static std::string name() { return "Tensor[]"; }
};
template <char ALIAS>
struct SchemaType<MutatedTensors<ALIAS>> {
  static std::string name() { return std::string("Tensor(") + ALIAS + "!)[]"; }
};
template <>
struct SchemaType<int64_t> {
  static std::string name() { return "int"; }
};
template <>
struct SchemaType<double> {
  static std::string name() { return "float"; }
};
template <>
struct SchemaType<bool> {
  static std::string name() { return "bool"; }
};
template <>
struct SchemaType<std::string> {
  static std::string name() { return "str"; }
};
template <>
struct SchemaType<Sizes> {
  static std::string name() { return "int[]"; }
};

// Appends "type name" to a comma-separated list; for a struct, one entry per field.
template <class T>
void describe(std::string& list, const std::string& name, const std::string& suffix) {
  if constexpr (IsStruct<T>::value)
    T::describe(list, suffix + "_" + name);
  else
    list += (list.empty() ? "" : ", ") + SchemaType<T>::name() + " " + name + suffix;
}

// The number of values of a field on torch's stack.
template <class T>
constexpr int count() {
  if constexpr (IsStruct<T>::value)
    return T::COUNT;
  else
    return 1;
}

// Takes the next value, or the values of a struct's fields, from torch's stack.
template <class T>
T unbox(StableIValue*& stack) {
  if constexpr (IsStruct<T>::value) {
    return T::unbox(stack);
  } else if constexpr (is_mutated<T>) {
    return T(torch::stable::detail::to<Tensors>(*stack++));
  } else {
    return torch::stable::detail::to<T>(*stack++);
  }
}

// Takes the next tensor, or the tensors of a struct's fields, from a list.
template <class T, class Next>
T take(Next& next) {
  if constexpr (IsStruct<T>::value)
    return T::take(next);
  else
    return *next++;
}

template <class T>
void box(StableIValue*& stack, const T& value) {
  if constexpr (IsStruct<T>::value)
    value.box(stack);
  else if constexpr (!is_mutated<T>)  // which no operator returns
    *stack++ = torch::stable::detail::from<T>(value);
}

template <class Function>
struct Signature;
template <class Result, class... Arguments>
struct Signature<Result (*)(Arguments...)> {
  static_assert((IsStruct<std::decay_t<Arguments>>::value && ...),
                "the arguments of an operator's kernel must be structs of FUSEDSEQ_DECLARE");

  static std::string schema(const std::string& op) {
    std::string arguments, results;
    (std::decay_t<Arguments>::describe(arguments, ""), ...);
    if constexpr (!std::is_void_v<Result>) Result::describe(results, "");
    return op + "(" + arguments + ") -> (" + results + ")";
  }

  template <Result (*kernel)(Arguments...)>
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    StableIValue* next = stack;
    // Braces evaluate from left to right, the order of the arguments on the stack.
    std::tuple<std::decay_t<Arguments>...> arguments{unbox<std::decay_t<Arguments>>(next)...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(kernel, arguments);
    } else {
      const Result result = std::apply(kernel, arguments);
      box(stack, result);
    }
  }
};

}  // namespace declaration

// The kernel as a function of torch's stack, for StableLibrary::impl.
template <auto kernel>
constexpr auto boxed = &declaration::Signature<decltype(kernel)>::template call<kernel>;

// Defines the operator `name` with the schema of a kernel's type, or of a kernel.
template <class Kernel>
void define(torch::stable::detail::StableLibrary& library, const char* name) {
  library.def(declaration::Signature<Kernel>::schema(name).c_str());
}
template <auto kernel>
void define(torch::stable::detail::StableLibrary& library, const char* name) {
  define<decltype(kernel)>(library, name);
}

// Whether bit `position` of the argument `needs` is set: whether that gradient is required.
inline bool is_needed(int64_t needs, int position) {
  return needs >> position & 1;
}

}  // namespace fusedseq

#define FUSEDSEQ_FIELD(type, name) type name;
#define FUSEDSEQ_POSITION(type, name) name,
#define FUSEDSEQ_COUNT(type, name) +::fusedseq::declaration::count<type>()
#define FUSEDSEQ_DESCRIBE(type, name) ::fusedseq::declaration::describe<type>(list, #name, suffix);
#define FUSEDSEQ_UNBOX(type, name) ::fusedseq::declaration::unbox<type>(stack),
#define FUSEDSEQ_TAKE(type, name) ::fusedseq::declaration::take<type>(next),
#define FUSEDSEQ_BOX(type, name) ::fusedseq::declaration::box<type>(stack, name);

// Position::<field> is the place of a field in the list: the bit of a gradient in `needs`.
#define FUSEDSEQ_DECLARE(Struct, FIELDS)                                           \
  struct Struct {                                                                  \
    FIELDS(FUSEDSEQ_FIELD)                                                         \
    struct Position {                                                              \
      enum : int { FIELDS(FUSEDSEQ_POSITION) };                                    \
    };                                                                             \
    [[maybe_unused]] static constexpr int COUNT = 0 FIELDS(FUSEDSEQ_COUNT);        \
    static void describe(std::string& list, const std::string& suffix) {           \
      FIELDS(FUSEDSEQ_DESCRIBE)                                                    \
    }                                                                              \
    static Struct unbox(StableIValue*& stack) { return {FIELDS(FUSEDSEQ_UNBOX)}; } \
    template <class Next>                                                          \
    static Struct take(Next& next) {                                               \
      return {FIELDS(FUSEDSEQ_TAKE)};                                              \
    }                                                                              \
    void box(StableIValue*& stack) const { FIELDS(FUSEDSEQ_BOX) }                  \
  };

namespace fusedseq {

// The last argument of every backward operator.
#define NEEDS(FIELD) FIELD(int64_t, needs)
FUSEDSEQ_DECLARE(Needs, NEEDS)

}  // namespace fusedseq
