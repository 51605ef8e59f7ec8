# mok: the program, in the root of the build folder, with the C++ runtime linked statically.
mok_sources(sources src/cli)
if(sources)
  find_package(CLI11 CONFIG REQUIRED)
  find_package(nlohmann_json CONFIG REQUIRED)
  find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)  # header only: XXH_INLINE_ALL

  add_executable(mok ${sources})
  target_link_libraries(mok PRIVATE mok_options mok_core mok_problem mok_reference CLI11::CLI11
                                    nlohmann_json::nlohmann_json)
  target_include_directories(mok SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
  if(NOT MOK_SANITIZE)
    target_link_options(mok PRIVATE -static-libstdc++ -static-libgcc)
  endif()
  set_target_properties(mok PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
endif()
