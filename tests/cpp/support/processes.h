// Ranks as forked processes.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace mok::test {

// Runs f(rank) in a process each; returns their exit statuses, -signal for one that was killed,
// 99 for one that threw. After `kill_after` seconds (0 = 120) those still alive are killed.
std::vector<int> fork_ranks(int ranks, const std::function<int(int)>& f, double kill_after = 0);

// A group name that no other test uses.
std::string unique_name();
// What lies in shared memory under that group's name.
std::vector<std::string> shared_memory_names(const std::string& group);

}  // namespace mok::test
