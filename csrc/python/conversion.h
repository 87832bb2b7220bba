// Converts the arguments of operators from Python and their results to Python.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/autograd_formulas.h"

namespace fusedseq {
namespace {

py::object to_python(const IValue& v) {
  if (is_given(v)) return py::reinterpret_steal<py::object>(THPVariable_Wrap(v.toTensor()));
  if (v.isDouble()) return py::float_(v.toDouble());
  if (v.isBool()) return py::bool_(v.toBool());
  if (v.isInt()) return py::int_(v.toInt());
  if (v.isString()) return py::str(v.toStringRef());
  return py::none();
}

py::object to_python(const variable_list& results) {
  if (results.size() == 1) return to_python(IValue(results[0]));
  py::tuple tuple(results.size());
  for (size_t i = 0; i < results.size(); ++i)
    tuple[i] = to_python(IValue(results[i]));
  return tuple;
}

py::list to_python(const Stack& values) {
  py::list all;
  for (const IValue& v : values)
    all.append(to_python(v));
  return all;
}

py::object not_implemented() {
  return py::reinterpret_borrow<py::object>(Py_NotImplemented);
}

bool convert_int(PyObject* value, int64_t& to) {
  int overflow = 0;
  to = PyLong_AsLongLongAndOverflow(value, &overflow);
  return !overflow;
}

// The type of an argument, from its operator's schema.
struct ArgumentType {
  c10::TypeKind kind;
  bool is_optional;
};

// Converts an argument to the type that the schema asks for. Returns false for a value that only
// Python can pass on: a tensor of a derived class, or a number that a compiler traces; and for one
// of which Python decides what it means: None for an argument that is not optional.
bool from_python(PyObject* value, ArgumentType type, IValue& to) {
  if (value == Py_None) return type.is_optional;
  int64_t number = 0;
  switch (type.kind) {
    case c10::TypeKind::TensorType:
      // A number in place of a tensor is a seed. Here it becomes a tensor on the CPU, as in
      // fused/check.py; for a call on a GPU `Formula::accepts` then returns false.
      if (PyLong_CheckExact(value)) {
        if (!convert_int(value, number)) return false;
        to = at::scalar_tensor(number, at::kLong);
        return true;
      }
      if (!THPVariable_CheckExact(value)) return false;
      to = THPVariable_Unpack(value);
      return true;
    case c10::TypeKind::FloatType:
      if (PyFloat_Check(value)) {
        to = PyFloat_AS_DOUBLE(value);
        return true;
      }
      if (!PyLong_CheckExact(value)) return false;
      to = PyLong_AsDouble(value);
      if (!PyErr_Occurred()) return true;
      PyErr_Clear();  // too large for a double
      return false;
    case c10::TypeKind::IntType:
      if (!PyLong_CheckExact(value) || !convert_int(value, number)) return false;
      to = number;
      return true;
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(value)) return false;
      to = value == Py_True;
      return true;
    case c10::TypeKind::StringType:
      if (!PyUnicode_Check(value)) return false;
      to = std::string(py::handle(value).cast<std::string>());
      return true;
    default:
      return false;
  }
}

}  // namespace
}  // namespace fusedseq
