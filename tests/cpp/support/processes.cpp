#include "support/processes.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>

namespace mok::test {

std::vector<int> fork_ranks(int ranks, const std::function<int(int)>& f, double kill_after) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (int r = 0; r < ranks; ++r) {
    const pid_t child = fork();
    if (child == 0) {
      int status = 99;
      try {
        status = f(r);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
      }
      std::fflush(nullptr);
      _exit(status);
    }
    children.push_back(child);
  }
  const auto start = std::chrono::steady_clock::now();
  const double limit = kill_after > 0 ? kill_after : 120;
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    while (waitpid(child, &status, WNOHANG) == 0) {
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
      if (passed.count() > limit) kill(child, SIGKILL);
      usleep(2000);
    }
    statuses.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  return statuses;
}

std::string unique_name() {
  static int count = 0;
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

std::vector<std::string> shared_memory_names(const std::string& group) {
  std::vector<std::string> names;
  const std::string prefix = "mok-" + group;
  if (DIR* dir = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(dir)) {
      const std::string name = entry->d_name;
      if (name.rfind(prefix, 0) == 0) names.push_back(name);
    }
    closedir(dir);
  }
  return names;
}

}  // namespace mok::test
