# Bench programs, built on demand (they are not part of `all`): ninja -C build unshard_timeline_bench unshard_collectives_bench unshard_async_file_bench unshard_optim_bench
foreach(bench core/timeline comm/collectives offload/async_file optim/optim zero/hosts)
  get_filename_component(name ${bench} NAME)
  add_executable(unshard_${name}_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/src/${bench}_bench.cc)
  target_link_libraries(unshard_${name}_bench PRIVATE unshard unshard_flags unshard_torch)
endforeach()
