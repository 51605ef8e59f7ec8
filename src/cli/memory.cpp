#include "cli/memory.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <thread>

#include "mok/error.h"

namespace mok::cli {

Memory::Memory(int64_t bytes, Sharing sharing) {
  if (bytes == 0) return;
  const int kind = sharing == Sharing::own ? MAP_PRIVATE : MAP_SHARED;
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS,
                 -1, 0);
  if (p == MAP_FAILED) {
    throw Error(ErrorCode::out_of_memory, "cannot take " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(p);
  bytes_ = bytes;
  if (sharing == Sharing::own) madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
}

Memory::~Memory() {
  if (data_) munmap(data_, static_cast<size_t>(bytes_));
}

namespace {

int64_t number_in(const char* path) {  // -1: none there ("max", no such file)
  std::ifstream file(path);
  int64_t value = -1;
  return file >> value ? value : -1;
}

}  // namespace

int64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  int64_t available = std::numeric_limits<int64_t>::max();
  for (std::string key; meminfo >> key;) {
    int64_t kilobytes = 0;
    if (key == "MemAvailable:" && meminfo >> kilobytes) available = kilobytes * 1024;
  }
  const int64_t limit = number_in("/sys/fs/cgroup/memory.max");
  const int64_t used = number_in("/sys/fs/cgroup/memory.current");
  if (limit >= 0 && used >= 0) available = std::min(available, std::max<int64_t>(0, limit - used));
  return available;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace mok::cli
