# Bench programs: built on demand (they are not part of `all`).
add_executable(unshard_collectives_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/src/comm/collectives_bench.cc)
target_link_libraries(unshard_collectives_bench PRIVATE unshard unshard_flags unshard_torch)
