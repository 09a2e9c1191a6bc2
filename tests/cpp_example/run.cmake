# The C++ program on two ranks, started by environment variables alone (torchrun's, then Open MPI's): every ZeRO stage prints the same
# losses, with the ranks' memory shared and apart, and a saved run goes on where it stopped.
set(work ${BUILD}/cpp_example)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})
string(RANDOM LENGTH 4 ALPHABET 0123456789 port)
set(port 2${port})

# Both ranks at once: execute_process runs its commands side by side; the last one's output comes back, so rank 0 is last.
function(train result rank_name size_name share stage)
  math(EXPR port "${port} + 1")
  set(port ${port} PARENT_SCOPE)
  file(WRITE ${work}/zero${stage}.json "{\"train_micro_batch_size_per_gpu\": 2, \"gradient_accumulation_steps\": 2, \"gradient_clipping\": 1.0,
    \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 1e-3}},
    \"zero_optimization\": {\"stage\": ${stage}, \"stage3_param_persistence_threshold\": 0}}")
  set(program ${BUILD}/bin/train_gpt --config ${work}/zero${stage}.json --text ${SOURCE}/examples/cpp/gpt.h --report-every 1
      --layers 2 --heads 2 --width 32 --context 32 --sample 8 ${ARGN})
  set(environment ${CMAKE_COMMAND} -E env OMP_NUM_THREADS=1 UNSHARD_SHARE_MEMORY=${share} MASTER_ADDR=127.0.0.1 MASTER_PORT=${port} ${size_name}=2)
  execute_process(COMMAND ${environment} ${rank_name}=1 ${program} COMMAND ${environment} ${rank_name}=0 ${program}
                  RESULTS_VARIABLE codes OUTPUT_VARIABLE output ERROR_VARIABLE errors TIMEOUT 100)
  if(NOT codes STREQUAL "0;0")
    message(FATAL_ERROR "ZeRO ${stage}, share_memory ${share}: exit codes ${codes}\n${output}\n${errors}")
  endif()
  string(REGEX MATCHALL "loss [0-9.]+ " losses "${output}")
  message("ZeRO ${stage} ${rank_name} share_memory=${share} ${ARGN}: ${losses}")
  set(${result} "${losses}" PARENT_SCOPE)
endfunction()

function(expect_same what got wanted)
  if(NOT got STREQUAL wanted OR wanted STREQUAL "")
    message(FATAL_ERROR "${what}: losses ${got}, expected ${wanted}")
  endif()
endfunction()

train(reference RANK WORLD_SIZE auto 0 --steps 4)
foreach(stage 1 2 3)
  train(losses RANK WORLD_SIZE auto ${stage} --steps 4)
  expect_same("ZeRO ${stage}" "${losses}" "${reference}")
endforeach()
foreach(stage 0 3)
  train(losses RANK WORLD_SIZE off ${stage} --steps 4)
  expect_same("ZeRO ${stage} without shared memory" "${losses}" "${reference}")
endforeach()
train(losses OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE auto 3 --steps 4)
expect_same("Open MPI's variables" "${losses}" "${reference}")

# An optimizer of the program's own, at stages that partition differently.
train(client RANK WORLD_SIZE auto 0 --steps 4 --client-optimizer)
train(losses RANK WORLD_SIZE auto 3 --steps 4 --client-optimizer)
expect_same("the client's optimizer at ZeRO 3" "${losses}" "${client}")

# A run that starts from a saved state draws the same batches again with the same seed: two loads agree.
train(losses RANK WORLD_SIZE auto 3 --steps 2 --save ${work}/state)
train(first RANK WORLD_SIZE auto 3 --steps 2 --load ${work}/state)
train(second RANK WORLD_SIZE auto 1 --steps 2 --load ${work}/state)
expect_same("a state saved at ZeRO 3 and loaded at ZeRO 1" "${second}" "${first}")
if(first STREQUAL losses)
  message(FATAL_ERROR "--load changed nothing: ${first}")
endif()
file(REMOVE_RECURSE ${work})
