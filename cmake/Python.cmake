# The Python module `_core` and a package tree that Python can import from the build directory: <build>/python on PYTHONPATH gives
# `import unshard` and `import deepspeed`. The sources are linked into it, so that an edit needs no build.
find_library(UNSHARD_TORCH_PYTHON torch_python PATHS ${UNSHARD_TORCH_LIB_DIR} NO_DEFAULT_PATH REQUIRED)
file(GLOB UNSHARD_PYTHON_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/python/*.cc)
set(UNSHARD_INFERENCE_MODULE ${CMAKE_SOURCE_DIR}/src/python/bind_inference.cc ${CMAKE_SOURCE_DIR}/src/python/bind_embedder.cc
    ${CMAKE_SOURCE_DIR}/src/python/inference_module.cc)
list(REMOVE_ITEM UNSHARD_PYTHON_SOURCES ${UNSHARD_INFERENCE_MODULE})
Python3_add_library(_core MODULE WITH_SOABI ${UNSHARD_PYTHON_SOURCES})
target_compile_definitions(_core PRIVATE TORCH_API_INCLUDE_EXTENSION_H)
target_compile_options(_core PRIVATE -Wno-attributes)     # holders of pybind11's hidden types are hidden too, as they should be
target_link_libraries(_core PRIVATE unshard ${UNSHARD_TORCH_PYTHON})

# `_inference` is the inference engine without torch, which a server needn't wait for. Of the areas' objects the linker takes what it needs;
# whatever would need torch makes the import fail (-z now), and a test.
set(objects "")
foreach(area core offload inference)
  if(TARGET unshard_${area})
    list(APPEND objects $<TARGET_OBJECTS:unshard_${area}>)
  endif()
endforeach()
add_library(unshard_inference_alone STATIC ${objects})
set_target_properties(unshard_inference_alone PROPERTIES LINKER_LANGUAGE CXX)
Python3_add_library(_inference MODULE WITH_SOABI ${UNSHARD_INFERENCE_MODULE})
target_compile_options(_inference PRIVATE -Wno-attributes)
target_link_libraries(_inference PRIVATE unshard_inference_alone unshard_flags)
target_link_options(_inference PRIVATE LINKER:-z,now)

set(UNSHARD_PYTHON_TREE ${CMAKE_BINARY_DIR}/python)
set_target_properties(_core _inference PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${UNSHARD_PYTHON_TREE}/unshard)
if(NOT APPLE)
  set_property(TARGET _core APPEND PROPERTY BUILD_RPATH "$ORIGIN/../../lib")
endif()
foreach(package unshard deepspeed)
  file(MAKE_DIRECTORY ${UNSHARD_PYTHON_TREE}/${package})
  file(GLOB entries CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/python/${package}/*)
  foreach(entry IN LISTS entries)
    get_filename_component(name ${entry} NAME)
    if(NOT name STREQUAL "__pycache__")
      file(CREATE_LINK ${entry} ${UNSHARD_PYTHON_TREE}/${package}/${name} SYMBOLIC)
    endif()
  endforeach()
endforeach()

# `pip install .` puts module and library side by side in the package. A wheel holds no links, so the library has one name there; torch's
# own libraries are in memory before either is loaded, and are found beside the package otherwise. A plain `cmake --install` is for C++.
set_target_properties(_core PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")
if(SKBUILD)
  set_property(TARGET unshard PROPERTY VERSION)
  set_target_properties(unshard PROPERTIES INSTALL_RPATH "$ORIGIN;$ORIGIN/../torch/lib")
endif()
install(TARGETS _core _inference LIBRARY DESTINATION unshard COMPONENT python EXCLUDE_FROM_ALL)
install(TARGETS unshard LIBRARY DESTINATION unshard COMPONENT python NAMELINK_SKIP EXCLUDE_FROM_ALL)
