# What a C++ project does: install the library to a prefix of its own, build examples/cpp beside it with find_package(unshard), and train
# two steps on one rank; then the README's example in the same way. Nothing of the build or source tree is on the projects' paths.
function(step what)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message("${output}")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "${what} failed (${code})")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

set(work ${BUILD}/cpp_install)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})
step("install" ${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component cpp)

# The project is copied away from this repository, so that only the installed headers can be found.
file(COPY ${SOURCE}/examples/cpp/ DESTINATION ${work}/project)
step("configuring the project" ${CMAKE_COMMAND} -S ${work}/project -B ${work}/build -G ${GENERATOR}
     -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_CXX_FLAGS=${FLAGS}
     -DCMAKE_PREFIX_PATH=${work}/prefix -DTorch_DIR=${Torch_DIR})
step("building the project" ${CMAKE_COMMAND} --build ${work}/build)

file(WRITE ${work}/config.json [[{
  "train_micro_batch_size_per_gpu": 2,
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
  "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}
}]])
step("training" ${work}/build/train_gpt --config ${work}/config.json --text ${SOURCE}/examples/cpp/gpt.h --steps 2 --report-every 1
     --layers 2 --heads 2 --width 32 --context 32 --sample 8)
foreach(wanted "step    1/2  loss [0-9.]+ " "step    2/2  loss [0-9.]+ " "loss [0-9.]+ -> [0-9.]+" "--- sample\ndef ")
  if(NOT output MATCHES "${wanted}")
    message(FATAL_ERROR "the program's output lacks '${wanted}'")
  endif()
endforeach()

# The C++ example of README.md, as it stands, in a project as the README describes it.
file(READ ${SOURCE}/README.md readme)
string(FIND "${readme}" "```cpp\n" begin)
math(EXPR begin "${begin} + 7")
string(SUBSTRING "${readme}" ${begin} -1 rest)
string(FIND "${rest}" "```" length)
string(SUBSTRING "${rest}" 0 ${length} program)
file(WRITE ${work}/readme/train.cc "${program}")
file(WRITE ${work}/readme/CMakeLists.txt [[
cmake_minimum_required(VERSION 3.25)
project(readme CXX)
find_package(unshard REQUIRED)
add_executable(train train.cc)
target_link_libraries(train PRIVATE unshard::unshard)
]])
step("configuring the README's example" ${CMAKE_COMMAND} -S ${work}/readme -B ${work}/readme/build -G ${GENERATOR}
     -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_COMPILER_LAUNCHER=${LAUNCHER} -DCMAKE_CXX_FLAGS=${FLAGS}
     -DCMAKE_PREFIX_PATH=${work}/prefix -DTorch_DIR=${Torch_DIR})
step("building the README's example" ${CMAKE_COMMAND} --build ${work}/readme/build)
step("the README's example" ${CMAKE_COMMAND} -E chdir ${work}/readme ${work}/readme/build/train)
if(NOT output MATCHES "step 9, loss [0-9.]+")
  message(FATAL_ERROR "the README's example prints no loss:\n${output}")
endif()
file(REMOVE_RECURSE ${work})
