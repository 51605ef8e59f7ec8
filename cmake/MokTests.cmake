# tests/cpp/<label>/<name>.cpp -> program test_<label>_<name>, its GoogleTest cases known to CTest
# with that label. tests/cpp/support: helpers that all of them link.
# Label "sanitize" (what the presets asan and tsan build and run): stress tests, and unit tests
# of the plan (unit/plan*.cpp).
add_custom_target(mok_sanitized_tests)

mok_component(mok_test_support FOLDERS tests/cpp/support
              DEPENDS mok_core mok_reference mok_plan mok_numerics)
mok_component(mok_test_includes FOLDERS tests/cpp/none)
target_include_directories(mok_test_includes INTERFACE ${PROJECT_SOURCE_DIR}/tests/cpp)
mok_link(mok_test_support mok_test_includes)

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
    if(NOT TARGET GTest::gtest_main)
      find_package(GTest REQUIRED)
      include(GoogleTest)
    endif()
    get_filename_component(stem ${test} NAME_WE)
    set(name test_${label}_${stem})
    add_executable(${name} ${test})
    target_link_libraries(${name} PRIVATE mok_options mok_test_support GTest::gtest_main)
    set(test_labels ${label})
    if(label STREQUAL stress OR name MATCHES "^test_unit_plan")
      set(test_labels "${label}\\;sanitize")
      add_dependencies(mok_sanitized_tests ${name})
    endif()
    gtest_discover_tests(${name} TEST_PREFIX "${label}." DISCOVERY_MODE PRE_TEST
                         DISCOVERY_TIMEOUT 60 PROPERTIES LABELS "${test_labels}" TIMEOUT 300)
  endforeach()
endforeach()
