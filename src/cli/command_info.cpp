// mok info: what this machine can run, and why not where it cannot.
#include <sys/statvfs.h>

#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>

#include "cli/commands.h"
#include "cli/cuda_support.h"
#include "cli/json.h"
#include "cli/memory.h"
#include "cpu/kernels.h"

namespace mok::cli {
namespace {

std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t colon = line.find(':');
    return colon + 2 < line.size() ? line.substr(colon + 2) : "";
  }
  return "";
}

struct Space {
  int64_t size = 0, available = 0;
};
Space shared_memory() {
  struct statvfs fs = {};
  if (statvfs("/dev/shm", &fs) != 0) return {};
  const auto block = static_cast<int64_t>(fs.f_frsize);
  return {static_cast<int64_t>(fs.f_blocks) * block, static_cast<int64_t>(fs.f_bavail) * block};
}

const char* name(cpu::Isa isa) {
  return isa == cpu::Isa::avx512 ? "avx512" : isa == cpu::Isa::avx2 ? "avx2" : "generic";
}

Json collect() {
  Json j;
  j["version"] = MOK_VERSION;
  j["build"]["compiler"] = __VERSION__;
#ifdef MOK_WITH_CUDA
  j["build"]["cuda"] = true;
  j["build"]["cuda_versions"] = cuda_versions();
#else
  j["build"]["cuda"] = false;
#endif
  j["build"]["sanitized"] = MOK_SANITIZED != 0;
  j["cpu"]["name"] = cpu_name();
  j["cpu"]["cores"] = usable_cores();
  j["cpu"]["kernels"] = name(cpu::best_isa());
  j["cpu"]["available_kernels"] = Json::array();
  for (const cpu::Isa isa : {cpu::Isa::generic, cpu::Isa::avx2, cpu::Isa::avx512}) {
    if (cpu::isa_available(isa)) j["cpu"]["available_kernels"].push_back(name(isa));
  }
  const Space shm = shared_memory();
  j["memory"]["available_bytes"] = available_bytes();
  j["memory"]["dev_shm_bytes"] = shm.size;
  j["memory"]["dev_shm_available_bytes"] = shm.available;
  j["cuda"]["why_not"] = why_no_gpu();  // empty: it can
  j["cuda"]["gpus"] = Json::array();
  for (const Gpu& gpu : list_gpus()) {
    j["cuda"]["gpus"].push_back(
        {{"name", gpu.name},
         {"capability", std::to_string(gpu.major) + "." + std::to_string(gpu.minor)},
         {"sms", gpu.sms},
         {"memory_bytes", gpu.memory_bytes},
         {"why_not", gpu.why_not},
         {"reaches", gpu.reaches}});
  }
  return j;
}

void print_text(const Json& j) {
  const auto text = [](const Json& v) { return v.get<std::string>(); };
  const auto gib = [](const Json& v) { return v.get<double>() / 0x1p30; };
  std::printf(
      "mok %s (compiler %s%s)\n", text(j["version"]).c_str(), text(j["build"]["compiler"]).c_str(),
      j["build"]["cuda"].get<bool>() ? (", CUDA " + text(j["build"]["cuda_versions"])).c_str()
                                     : ", without CUDA");
  std::string all;
  for (const Json& k : j["cpu"]["available_kernels"]) all += " " + text(k);
  std::printf("cpu       %s, %d cores, kernels %s (of%s)\n", text(j["cpu"]["name"]).c_str(),
              j["cpu"]["cores"].get<int>(), text(j["cpu"]["kernels"]).c_str(), all.c_str());
  std::printf("memory    %.1f GiB available\n", gib(j["memory"]["available_bytes"]));
  std::printf("/dev/shm  %.1f GiB, %.1f GiB available (ranks as processes)\n",
              gib(j["memory"]["dev_shm_bytes"]), gib(j["memory"]["dev_shm_available_bytes"]));
  const std::string why_not = text(j["cuda"]["why_not"]);
  std::printf("cuda      %s\n", why_not.empty() ? "yes" : ("no: " + why_not).c_str());
  int index = 0;
  for (const Json& gpu : j["cuda"]["gpus"]) {
    std::string peers;
    for (size_t other = 0; other < gpu["reaches"].size(); ++other) {
      if (static_cast<int>(other) == index || !gpu["reaches"][other].get<bool>()) continue;
      peers += " " + std::to_string(other);
    }
    const std::string why = text(gpu["why_not"]);
    std::printf("gpu %d     %s, capability %s, %d SMs, %.1f GiB, reaches:%s%s\n", index++,
                text(gpu["name"]).c_str(), text(gpu["capability"]).c_str(), gpu["sms"].get<int>(),
                gib(gpu["memory_bytes"]), peers.empty() ? " none" : peers.c_str(),
                why.empty() ? "" : (", cannot run the layer: " + why).c_str());
  }
}

}  // namespace

Command add_info(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "prints one JSON object");
  return [json] {
    const Json j = collect();
    if (*json) {
      std::cout << j.dump(2) << "\n";
    } else {
      print_text(j);
    }
    return static_cast<int>(kFine);
  };
}

}  // namespace mok::cli
