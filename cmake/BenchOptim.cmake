# The bench of the update: unshard_optim_bench [MILLIONS] [REPEATS] [THREADS ...]; built on demand
add_executable(unshard_optim_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/src/optim/optim_bench.cc)
target_link_libraries(unshard_optim_bench PRIVATE unshard unshard_flags unshard_torch)
