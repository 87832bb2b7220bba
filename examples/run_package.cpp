// Runs a package of AOTInductor (examples/export.py --compile makes one) without Python:
//
//   run_package _ops.so package.pt2 inputs.pt outputs.pt
//
// The .pt files are a list and a tuple of tensors, which torch.save writes and torch.load reads.
// Compile it with the headers and libraries of the torch that made the package, whose folders are
// `torch.utils.cpp_extension.include_paths()` and `library_paths()`:
//
//   g++ -std=c++20 run_package.cpp -I INCLUDE ... -L LIB -Wl,-rpath,LIB -ltorch -ltorch_cpu -lc10
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: run_package _ops.so package.pt2 inputs.pt outputs.pt\n";
    return 2;
  }
  // The library registers the operators with torch's dispatcher, where the package looks for them.
  if (!dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL)) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  std::ifstream file(argv[3], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue list = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const c10::IValue& x : list.toListRef())
    inputs.push_back(x.toTensor());

  torch::inductor::AOTIModelPackageLoader model(argv[2]);
  const c10::InferenceMode no_gradients;
  const std::vector<at::Tensor> outputs = model.run(inputs);

  std::vector<c10::IValue> values(outputs.begin(), outputs.end());
  for (const at::Tensor& y : outputs)
    std::cout << y.scalar_type() << " " << y.sizes() << ", sum " << y.sum().item<double>() << "\n";
  const auto pickled = torch::jit::pickle_save(c10::ivalue::Tuple::create(std::move(values)));
  std::ofstream(argv[4], std::ios::binary).write(pickled.data(), pickled.size());
}
