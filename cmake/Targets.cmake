# The library as a package for C++ projects (find_package(unshard) after `cmake --install`), and the C++ example program.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Users of the installed library get its headers and torch; what our own sources are compiled with (warnings, Gloo's headers) stays here.
set_target_properties(unshard PROPERTIES
  EXPORT_NAME unshard BUILD_RPATH_USE_ORIGIN ON
  INTERFACE_LINK_LIBRARIES "$<BUILD_INTERFACE:unshard_flags>;$<BUILD_INTERFACE:unshard_torch>;$<INSTALL_INTERFACE:unshard::torch>")
target_compile_features(unshard INTERFACE cxx_std_20)
target_include_directories(unshard INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
add_library(unshard::unshard ALIAS unshard)
if(NOT UNSHARD_SANITIZE)               # whose runtime only programs bring
  target_link_options(unshard PRIVATE LINKER:--no-undefined)
endif()

# Torch's libraries are found beside ours where both are under one prefix (an environment that may be moved), else where they are now.
cmake_path(IS_PREFIX CMAKE_INSTALL_PREFIX "${UNSHARD_TORCH_LIB_DIR}" NORMALIZE torch_below_prefix)
if(torch_below_prefix)
  file(RELATIVE_PATH torch_rpath "${CMAKE_INSTALL_FULL_LIBDIR}" "${UNSHARD_TORCH_LIB_DIR}")
  set(torch_rpath "$ORIGIN/${torch_rpath}")
else()
  set(torch_rpath "${UNSHARD_TORCH_LIB_DIR}")
endif()
set_target_properties(unshard PROPERTIES INSTALL_RPATH "$ORIGIN;${torch_rpath}")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/unshard)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" UNSHARD_TORCH_SERIES "${Torch_VERSION}")
configure_package_config_file(cmake/unshardConfig.cmake.in ${CMAKE_BINARY_DIR}/unshardConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/unshardConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(TARGETS unshard EXPORT unshardTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp NAMELINK_COMPONENT cpp)
install(DIRECTORY include/unshard DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT cpp)
install(EXPORT unshardTargets NAMESPACE unshard:: DESTINATION ${package_dir} COMPONENT cpp)
install(FILES ${CMAKE_BINARY_DIR}/unshardConfig.cmake ${CMAKE_BINARY_DIR}/unshardConfigVersion.cmake DESTINATION ${package_dir} COMPONENT cpp)

if(UNSHARD_BUILD_EXAMPLES)
  add_executable(train_gpt examples/cpp/train_gpt.cc examples/cpp/arguments.cc)
  target_link_libraries(train_gpt PRIVATE unshard)
  set_target_properties(train_gpt PROPERTIES BUILD_RPATH_USE_ORIGIN ON)
  add_executable(generate examples/cpp/generate.cc)
  target_link_libraries(generate PRIVATE unshard)
  set_target_properties(generate PROPERTIES BUILD_RPATH_USE_ORIGIN ON)
endif()

if(UNSHARD_BUILD_TESTS AND NOT UNSHARD_SANITIZE)
  add_test(NAME cpp_install
           COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR} -DSOURCE=${CMAKE_SOURCE_DIR} -DTorch_DIR=${Torch_DIR}
                   -DLAUNCHER=${UNSHARD_LAUNCHER} -DCOMPILER=${CMAKE_CXX_COMPILER} -DGENERATOR=${CMAKE_GENERATOR}
                   -DMAKE_PROGRAM=${CMAKE_MAKE_PROGRAM} "-DFLAGS=${CMAKE_CXX_FLAGS}"
                   -P ${CMAKE_SOURCE_DIR}/tests/cpp_install/run.cmake)
  set_tests_properties(cpp_install PROPERTIES TIMEOUT 600 LABELS install ENVIRONMENT OMP_NUM_THREADS=1)
  if(UNSHARD_BUILD_EXAMPLES)
    add_test(NAME cpp_example COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR} -DSOURCE=${CMAKE_SOURCE_DIR} -P ${CMAKE_SOURCE_DIR}/tests/cpp_example/run.cmake)
    set_tests_properties(cpp_example PROPERTIES TIMEOUT 600 LABELS example)
  endif()
endif()
