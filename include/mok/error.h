// Errors of the public API.
#pragma once

#include <stdexcept>
#include <string>

namespace mok {

enum class ErrorCode {
  bad_argument,   // a value, shape or size is out of its range; the message names the argument
  bad_type,       // a dtype or kind of object is not supported
  bad_routing,    // an expert id outside [-1, E) was met (rank, token, slot and id are named)
  disagreement,   // ranks called with different directions, shapes, dtypes or options
  aborted,        // a peer failed or left; the message names it
  deadline,       // arrival of a peer or progress took longer than its deadline
  out_of_memory,  // memory or shared memory could not be taken
  unsupported,    // this machine or this build cannot do it
  internal,       // a broken invariant: a defect of this library
};

const char* to_string(ErrorCode code);

// Every error of the library. Nothing was written to the caller's outputs unless the message says
// so, and the next call on the same objects works.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

inline const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::bad_argument:
      return "bad argument";
    case ErrorCode::bad_type:
      return "bad type";
    case ErrorCode::bad_routing:
      return "bad routing";
    case ErrorCode::disagreement:
      return "ranks disagree";
    case ErrorCode::aborted:
      return "aborted";
    case ErrorCode::deadline:
      return "deadline";
    case ErrorCode::out_of_memory:
      return "out of memory";
    case ErrorCode::unsupported:
      return "unsupported";
    case ErrorCode::internal:
      return "internal";
  }
  return "unknown";
}

}  // namespace mok
