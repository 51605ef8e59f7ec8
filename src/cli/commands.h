// The subcommands. `add_*` declares options on `app`; what it returns runs it: the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace mok::cli {

enum Exit : int { kFine = 0, kCheckFailed = 1, kBadUsage = 2, kRunFailed = 3 };

using Command = std::function<int()>;

Command add_run(CLI::App& app);
Command add_check(CLI::App& app);
Command add_plan(CLI::App& app);
Command add_info(CLI::App& app);
Command add_bench(CLI::App& app);

}  // namespace mok::cli
