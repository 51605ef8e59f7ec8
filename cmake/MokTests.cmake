# tests/cpp/<label>/<name>.cpp -> program test_<label>_<name>, its GoogleTest cases known to CTest
# with that label. tests/cpp/support: helpers that all of them link.
# A sanitizer build has only the tests that hunt races and stray writes: stress/*.cpp and
# unit/plan*.cpp.
add_custom_target(mok_tests)

mok_component(mok_test_support FOLDERS tests/cpp/support
              DEPENDS mok_core mok_problem mok_reference mok_plan mok_numerics)
mok_component(mok_test_includes FOLDERS tests/cpp/none)
target_include_directories(mok_test_includes INTERFACE ${PROJECT_SOURCE_DIR}/tests/cpp)
mok_link(mok_test_support mok_test_includes)

set(timeout 300)
if(MOK_SANITIZE)
  set(timeout 900)
endif()
set(labels unit stress cases)
if(MOK_HAVE_CUDA)
  list(APPEND labels gpu)
endif()
foreach(label IN LISTS labels)
  file(GLOB tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/cpp/${label}/*.cpp)
  if(MOK_HAVE_CUDA)
    file(GLOB cuda_tests CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/tests/cpp/${label}/*.cu)
    list(APPEND tests ${cuda_tests})
  endif()
  foreach(test IN LISTS tests)
    get_filename_component(stem ${test} NAME_WE)
    set(name test_${label}_${stem})
    if(MOK_SANITIZE AND NOT name MATCHES "^test_(stress_|unit_plan)")
      continue()
    endif()
    if(NOT TARGET GTest::gtest_main)
      find_package(GTest REQUIRED)
      include(GoogleTest)
    endif()
    add_executable(${name} ${test})
    target_link_libraries(${name} PRIVATE mok_options mok_test_support GTest::gtest_main)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
    add_dependencies(mok_tests ${name})
    gtest_discover_tests(${name} TEST_PREFIX "${label}." DISCOVERY_MODE PRE_TEST
                         DISCOVERY_TIMEOUT 60 PROPERTIES LABELS ${label} TIMEOUT ${timeout})
  endforeach()
endforeach()
