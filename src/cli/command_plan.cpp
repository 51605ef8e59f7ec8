#include "cli/commands.h"
namespace mok::cli {
Command add_plan(CLI::App&) {
  return [] { return 0; };
}
}  // namespace mok::cli
