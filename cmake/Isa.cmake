# One source, three instruction sets: the flags of each, by file name (src/core, src/optim, src/inference). Chosen at run time (src/core/cpu_isa.cc).
# Contraction is off everywhere: a multiply-add is fused only where the source says so, which keeps the bits equal between the sets.
file(GLOB isa_portable ${CMAKE_SOURCE_DIR}/src/core/*_portable.cc ${CMAKE_SOURCE_DIR}/src/optim/*_portable.cc
     ${CMAKE_SOURCE_DIR}/src/inference/*/*_portable.cc)
file(GLOB isa_avx2 ${CMAKE_SOURCE_DIR}/src/core/*_avx2.cc ${CMAKE_SOURCE_DIR}/src/optim/*_avx2.cc
     ${CMAKE_SOURCE_DIR}/src/inference/*/*_avx2.cc)
file(GLOB isa_avx512 ${CMAKE_SOURCE_DIR}/src/core/*_avx512.cc ${CMAKE_SOURCE_DIR}/src/optim/*_avx512.cc
     ${CMAKE_SOURCE_DIR}/src/inference/*/*_avx512.cc)
file(GLOB isa_avx512_bf16 ${CMAKE_SOURCE_DIR}/src/inference/kernels/*_avx512_bf16.cc)
file(GLOB isa_avx512_vnni ${CMAKE_SOURCE_DIR}/src/inference/kernels/*_avx512_vnni.cc)
set(isa_flags -ffp-contract=off -fno-math-errno -fno-trapping-math)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND isa_flags -Wno-maybe-uninitialized -Wno-uninitialized)    # the compiler's own headers: _mm512_undefined and kin
endif()
set_source_files_properties(${isa_portable} PROPERTIES COMPILE_OPTIONS "${isa_flags};-O3")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set_source_files_properties(${isa_avx2} PROPERTIES COMPILE_OPTIONS "${isa_flags};-mavx2;-mfma;-mf16c")
  set(isa_avx512_flags ${isa_flags} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mprefer-vector-width=512)
  set_source_files_properties(${isa_avx512} PROPERTIES COMPILE_OPTIONS "${isa_avx512_flags}")
  set_source_files_properties(${isa_avx512_bf16} PROPERTIES COMPILE_OPTIONS "${isa_avx512_flags};-mavx512bf16")
  set_source_files_properties(${isa_avx512_vnni} PROPERTIES COMPILE_OPTIONS "${isa_avx512_flags};-mavx512vnni")
endif()

# Loops over tiles of products and attention, and packing, are worth the longer compilation.
file(GLOB isa_inference ${CMAKE_SOURCE_DIR}/src/inference/kernels/*_avx2.cc ${CMAKE_SOURCE_DIR}/src/inference/kernels/*_avx512*.cc
     ${CMAKE_SOURCE_DIR}/src/inference/kernels/quantize.cc)
set_property(SOURCE ${isa_inference} APPEND PROPERTY COMPILE_OPTIONS -O3)

# ATen's parallel_for is an OpenMP template: the one file that instantiates it needs the flag, and whatever links it the library. Torch's
# own copy when it brings one, so that a process has one pool of threads.
find_package(OpenMP COMPONENTS CXX)
if(OpenMP_CXX_FOUND)
  separate_arguments(isa_openmp UNIX_COMMAND "${OpenMP_CXX_FLAGS}")
  set_source_files_properties(${CMAKE_SOURCE_DIR}/src/core/parallel.cc PROPERTIES COMPILE_OPTIONS "${isa_openmp}")
  file(GLOB isa_openmp_library ${UNSHARD_TORCH_LIB_DIR}/libgomp*.so*)
  if(NOT isa_openmp_library)
    set(isa_openmp_library ${OpenMP_CXX_LIBRARIES})
  endif()
  target_link_libraries(unshard_core PUBLIC ${isa_openmp_library})
endif()
