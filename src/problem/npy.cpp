#include "problem/npy.h"

#include <bit>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>

#include "mok/error.h"

namespace mok::problem {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr int64_t kMaxElements = int64_t{1} << 40;

// The header is a Python dictionary literal with three entries:
//   {'descr': '<i8', 'fortran_order': False, 'shape': (3, 4), }
class Header {
 public:
  Header(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  [[noreturn]] void bad(const std::string& what) const {
    throw Error(ErrorCode::bad_argument, path_ + ": " + what);
  }

  // What follows 'key':
  std::string_view entry(const std::string& key) const {
    const size_t at = text_.find("'" + key + "'");
    const size_t colon = at == text_.npos ? at : text_.find(':', at);
    if (colon == text_.npos) bad("the header has no '" + key + "'");
    const size_t begin = text_.find_first_not_of(' ', colon + 1);
    return begin == text_.npos ? std::string_view() : text_.substr(begin);
  }

  int element_size() const {
    const std::string_view type = entry("descr");
    if (type.starts_with("'<i4'")) return 4;
    if (type.starts_with("'<i8'")) return 8;
    const std::string_view quoted = type.substr(0, type.find(','));
    bad("the element type is " + std::string(quoted) + ", wanted int32 or int64 ('<i4', '<i8')");
  }

  bool fortran_order() const {
    const std::string_view order = entry("fortran_order");
    if (order.starts_with("True")) return true;
    if (order.starts_with("False")) return false;
    bad("'fortran_order' is neither True nor False");
  }

  std::vector<int64_t> shape() const {
    const std::string_view value = entry("shape");
    const size_t close = value.find(')');
    if (!value.starts_with('(') || close == value.npos) bad("'shape' is not a tuple");
    std::string_view list = value.substr(1, close - 1);
    std::vector<int64_t> dims;
    int64_t count = 1;
    while (true) {
      const size_t begin = list.find_first_not_of(' ');
      if (begin == list.npos) break;
      list.remove_prefix(begin);
      int64_t dim = -1;
      const auto [stop, error] = std::from_chars(list.data(), list.data() + list.size(), dim);
      if (error != std::errc() || dim < 0) bad("'shape' holds something other than sizes");
      list.remove_prefix(static_cast<size_t>(stop - list.data()));
      dims.push_back(dim);
      if (dim > 0 && count > kMaxElements / dim) bad("'shape' is too large");
      count *= dim;
      const size_t comma = list.find_first_not_of(' ');
      if (comma == list.npos) break;
      if (list[comma] != ',') bad("'shape' holds something other than sizes");
      list.remove_prefix(comma + 1);
    }
    if (dims.empty() || dims.size() > 2) {
      bad("has " + std::to_string(dims.size()) + " dimensions, wanted 1 or 2");
    }
    return dims;
  }

 private:
  const std::string& path_;
  std::string_view text_;
};

template <class T>
void read_values(std::string_view data, std::vector<int64_t>& out) {
  for (size_t i = 0; i < out.size(); ++i) {
    T value;
    std::memcpy(&value, data.data() + i * sizeof(T), sizeof(T));
    out[i] = value;
  }
}

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

NpyInts read_npy_ints(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) throw Error(ErrorCode::bad_argument, path + ": cannot be opened");
  std::string file;
  try {
    file.assign(std::istreambuf_iterator<char>(stream), {});
  } catch (const std::ios_base::failure&) {  // a folder, for one
    throw Error(ErrorCode::bad_argument, path + ": cannot be read");
  }

  Header nothing(path, {});
  if (!std::string_view(file).starts_with(kMagic)) nothing.bad("is not an .npy file");
  if (file.size() < 10) nothing.bad("ends inside its header");
  const int version = file[6];
  if (version < 1 || version > 3) nothing.bad("format version " + std::to_string(version));
  const size_t begin = version == 1 ? 10 : 12;  // the length of the header has 2 or 4 bytes
  uint32_t length = 0;
  if (file.size() >= begin) std::memcpy(&length, file.data() + 8, begin - 8);
  if (file.size() < begin || file.size() - begin < length) nothing.bad("ends inside its header");

  const Header header(path, std::string_view(file).substr(begin, length));
  NpyInts array;
  array.shape = header.shape();
  const auto size = static_cast<size_t>(header.element_size());
  const bool one_column = array.shape.size() == 1 || array.shape[0] <= 1 || array.shape[1] <= 1;
  if (header.fortran_order() && !one_column) {
    header.bad("is in Fortran order, wanted C order (numpy.ascontiguousarray)");
  }
  size_t count = 1;
  for (const int64_t dim : array.shape) count *= static_cast<size_t>(dim);
  const std::string_view data = std::string_view(file).substr(begin + length);
  if (data.size() != count * size) {
    header.bad("holds " + std::to_string(data.size()) + " bytes of values, shape " +
               shape_text(array.shape) + " wants " + std::to_string(count * size));
  }
  array.values.resize(count);
  size == 4 ? read_values<int32_t>(data, array.values) : read_values<int64_t>(data, array.values);
  return array;
}

void write_npy_ints(const std::string& path, const NpyInts& array) {
  std::string header =
      "{'descr': '<i8', 'fortran_order': False, 'shape': " + shape_text(array.shape) + ", }";
  header.append(63 - (10 + header.size()) % 64, ' ');  // values start at a multiple of 64
  header += '\n';
  const auto length = static_cast<uint16_t>(header.size());
  std::ofstream stream(path, std::ios::binary);
  stream << kMagic << '\x01' << '\x00';
  stream.write(reinterpret_cast<const char*>(&length), 2) << header;
  stream.write(reinterpret_cast<const char*>(array.values.data()),
               static_cast<std::streamsize>(array.values.size() * sizeof(int64_t)));
  if (!stream.flush()) throw Error(ErrorCode::bad_argument, path + ": cannot be written");
}

}  // namespace mok::problem
