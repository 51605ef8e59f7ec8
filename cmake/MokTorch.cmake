# mok_torch: libmok_torch.so, the PyTorch operators, written against LibTorch's stable C interface:
# one build serves every Python and every PyTorch from MOK_TORCH_TARGET on. It is loaded with
# torch.ops.load_library, which implies that libtorch is in the process already (no RPATH needed).
set(MOK_TORCH_TARGET 0x020a000000000000)  # 2.10

if(NOT MOK_PYTHON)
  if(EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    set(MOK_PYTHON ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  else()
    find_package(Python3 COMPONENTS Interpreter)
    set(MOK_PYTHON ${Python3_EXECUTABLE})
  endif()
endif()
set(MOK_PYTHON ${MOK_PYTHON} CACHE FILEPATH "The Python whose PyTorch is built against")

mok_sources(sources python/csrc)
if(MOK_TORCH AND sources)
  # Asks where the package lies, without the seconds that an import takes.
  execute_process(
    COMMAND ${MOK_PYTHON} -c
      "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
    OUTPUT_VARIABLE torch_dir RESULT_VARIABLE failed ERROR_QUIET)
  if(failed OR NOT EXISTS ${torch_dir}/include/torch/csrc/stable/library.h)
    if(NOT MOK_TORCH STREQUAL AUTO)
      message(FATAL_ERROR "MOK_TORCH=ON, but '${MOK_PYTHON}' has no PyTorch >= 2.10: install it there, "
                          "or name another Python with -DMOK_PYTHON=")
    endif()
    message(STATUS "PyTorch >= 2.10 not found: no libmok_torch.so")
  else()
    message(STATUS "PyTorch: ${torch_dir}")
    add_library(mok_torch MODULE ${sources})
    target_link_libraries(mok_torch PRIVATE mok_options mok_core)
    target_include_directories(mok_torch SYSTEM PRIVATE ${torch_dir}/include)
    target_compile_definitions(mok_torch PRIVATE TORCH_TARGET_VERSION=${MOK_TORCH_TARGET} TORCH_STABLE_ONLY)
    target_link_libraries(mok_torch PRIVATE ${torch_dir}/lib/libtorch_cpu.so)
    target_link_options(mok_torch PRIVATE -Wl,--exclude-libs,ALL)
    set_target_properties(mok_torch PROPERTIES
      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}
      SKIP_BUILD_RPATH ON)
    install(TARGETS mok_torch LIBRARY DESTINATION mok)
  endif()
endif()
