# mok_options: how this project's own code is compiled; linked PRIVATE into each target.
add_library(mok_options INTERFACE)

set(_warnings -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wno-psabi)
if(MOK_WERROR)
  list(APPEND _warnings -Werror)
endif()
target_compile_options(mok_options INTERFACE
  # A fused multiply-add is written out where it is meant: the same bits on every machine.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CXX>:${_warnings}>
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:--fmad=false -Xcompiler=-Wall,-Wextra,-Wno-unused-parameter,-ffp-contract=off -Xptxas=-v --expt-relaxed-constexpr>")
if(MOK_WERROR)
  target_compile_options(mok_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror=all-warnings>")
endif()
if(MOK_MARCH)
  target_compile_options(mok_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${MOK_MARCH}>)
endif()
target_compile_definitions(mok_options INTERFACE MOK_VERSION="${PROJECT_VERSION}")

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
target_link_libraries(mok_options INTERFACE Threads::Threads)

# 1 in a sanitizer build, where tests had better draw fewer problems.
target_compile_definitions(mok_options INTERFACE MOK_SANITIZED=$<BOOL:${MOK_SANITIZE}>)
if(MOK_SANITIZE)
  set(_sanitize -fsanitize=${MOK_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  target_compile_options(mok_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${_sanitize}>)
  target_link_options(mok_options INTERFACE -fsanitize=${MOK_SANITIZE})
endif()

# mok_sources(VAR FOLDER...): the sources below the folders; a new file is seen at the next build.
function(mok_sources var)
  set(patterns)
  foreach(folder IN LISTS ARGN)
    list(APPEND patterns ${PROJECT_SOURCE_DIR}/${folder}/*.cpp)
    if(MOK_HAVE_CUDA)
      list(APPEND patterns ${PROJECT_SOURCE_DIR}/${folder}/*.cu)
    endif()
  endforeach()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${patterns})
  set(${var} ${sources} PARENT_SCOPE)
endfunction()

# mok_link(TARGET LIBRARY...): links for a target made by mok_component, header-only or not.
function(mok_link target)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL INTERFACE_LIBRARY)
    target_link_libraries(${target} INTERFACE ${ARGN})
  else()
    target_link_libraries(${target} PUBLIC ${ARGN})
  endif()
endfunction()

# mok_component(NAME FOLDERS folder... [DEPENDS library...]): a static library, or a header-only one.
# Code includes <mok/error.h> (public) and "plan/schedule.h" (path below src).
function(mok_component name)
  cmake_parse_arguments(arg "" "" "FOLDERS;DEPENDS" ${ARGN})
  mok_sources(sources ${arg_FOLDERS})
  if(sources)
    add_library(${name} STATIC ${sources})
    target_link_libraries(${name} PRIVATE mok_options)
    set(scope PUBLIC)
  else()
    add_library(${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(${name} ${scope} ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_compile_features(${name} ${scope} cxx_std_20)
  mok_link(${name} ${arg_DEPENDS})
  if(name STREQUAL mok_cuda)
    # For the code that chooses an executor: #ifdef MOK_WITH_CUDA.
    target_compile_definitions(${name} ${scope} MOK_WITH_CUDA=1)
    target_link_libraries(${name} ${scope} CUDA::cudart_static)
  endif()
endfunction()

# mok_headers_compile(NAME CXX|CUDA FOLDERS folder...): a target, not part of "all", that compiles
# each header alone.
function(mok_headers_compile name language)
  cmake_parse_arguments(arg "" "" "FOLDERS" ${ARGN})
  set(extension_CXX cpp)
  set(extension_CUDA cu)
  set(units)
  foreach(folder IN LISTS arg_FOLDERS)
    set(patterns ${PROJECT_SOURCE_DIR}/${folder}/*.h ${PROJECT_SOURCE_DIR}/${folder}/*.hpp)
    if(language STREQUAL CUDA)
      list(APPEND patterns ${PROJECT_SOURCE_DIR}/${folder}/*.cuh)
    endif()
    file(GLOB_RECURSE headers CONFIGURE_DEPENDS ${patterns})
    foreach(header IN LISTS headers)
      file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${header})
      string(REGEX REPLACE "[/.]" "_" unit ${path})
      set(unit ${CMAKE_CURRENT_BINARY_DIR}/${name}_units/${unit}.${extension_${language}})
      file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"${header}\"\n" @ONLY)
      list(APPEND units ${unit})
    endforeach()
  endforeach()
  if(units)
    add_library(${name} OBJECT EXCLUDE_FROM_ALL ${units})
    target_link_libraries(${name} PRIVATE mok_options mok_plan mok_numerics)
  else()
    add_custom_target(${name})
  endif()
endfunction()
