// Integer arrays in NumPy's .npy format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace mok::problem {

struct NpyInts {
  std::vector<int64_t> shape;
  std::vector<int64_t> values;  // row-major
};

// int32 or int64, little endian, C order, one or two dimensions; format versions 1 to 3. Throws
// bad_argument that names the file and what is wrong with it.
NpyInts read_npy_ints(const std::string& path);

// As int64.
void write_npy_ints(const std::string& path, const NpyInts& array);

std::string shape_text(const std::vector<int64_t>& shape);  // "(3, 4)"

}  // namespace mok::problem
