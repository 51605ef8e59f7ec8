// mok: runs the layer, checks it, prints its plan, measures it, and says what this machine can run.
//
// Exit codes: 0 fine, 1 a check failed, 2 bad usage or bad input, 3 run-time failure. For 2 and 3
// there is one line on stderr; for 2 it names the argument.
#include <cstdio>
#include <iostream>
#include <map>
#include <new>

#include "cli/commands.h"
#include "mok/error.h"

namespace {

using namespace mok::cli;  // NOLINT: a program's own names

int complain(int code, std::string text) {
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  std::fprintf(stderr, "mok: %s\n", text.c_str());
  return code;
}

int run_command(const Command& command) {
  try {
    const int code = command();
    if (!std::cout.flush()) return complain(kRunFailed, "cannot write the output");
    return code;
  } catch (const mok::Error& e) {
    const bool usage =
        e.code() == mok::ErrorCode::bad_argument || e.code() == mok::ErrorCode::bad_type;
    return complain(usage ? kBadUsage : kRunFailed,
                    usage ? e.what() : std::string(to_string(e.code())) + ": " + e.what());
  } catch (const std::bad_alloc&) {
    return complain(kRunFailed, "out of memory");
  } catch (const std::exception& e) {
    return complain(kRunFailed, e.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Mixture-of-experts layers: one plan, several executors.", "mok");
  app.set_version_flag("--version", "mok " MOK_VERSION);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.require_subcommand(0, 1);
  std::map<const CLI::App*, Command> commands;
  const auto add = [&](const char* name, const char* what, Command (*declare)(CLI::App&)) {
    CLI::App* sub = app.add_subcommand(name, what);
    commands[sub] = declare(*sub);
  };
  add("run", "runs the layer once and prints digests, errors and times", add_run);
  add("check", "a table of shapes and routings against the oracle", add_check);
  add("plan", "the plan of a problem: rows, tasks, bytes per link, memory", add_plan);
  add("bench", "measures the layer over shapes and routings", add_bench);
  add("info", "what this machine can run, and why not where it cannot", add_info);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app.exit(e);  // --help, --version
    return complain(kBadUsage, e.what());
  }
  if (app.get_subcommands().empty()) {
    return complain(kBadUsage, "a subcommand is missing: run, check, plan, bench or info");
  }
  return run_command(commands.at(app.get_subcommands().front()));
}
