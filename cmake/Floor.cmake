# Includes are written "floor/file.h". So that a floor finds only what it may include,
# each floor has an include root of its own that holds nothing but itself.
function(dreamcomm_include_root name variable)
  string(REPLACE "/" "_" folder "${name}")
  set(root "${PROJECT_BINARY_DIR}/include/${folder}")
  cmake_path(GET name PARENT_PATH above)
  file(MAKE_DIRECTORY "${root}/${above}")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/csrc/${name}" "${root}/${name}" SYMBOLIC)
  set(${variable} "${root}" PARENT_SCOPE)
endfunction()

# dreamcomm_floor(NAME [ON lower...] [OPTIMIZE level] [WITHOUT room...]): the static library dc_NAME
# of csrc/NAME, which sees the headers of the lower floors and of those below them. WITHOUT leaves
# the sources of rooms out. A room can be a library like a floor: dc_c10d_messages of c10d/messages.
function(dreamcomm_floor name)
  cmake_parse_arguments(floor "" "OPTIMIZE" "ON;WITHOUT" ${ARGN})
  string(REPLACE "/" "_" target "dc_${name}")
  if(NOT floor_OPTIMIZE)
    set(floor_OPTIMIZE -O2)
  endif()
  list(TRANSFORM floor_ON PREPEND dc_ OUTPUT_VARIABLE lower)
  dreamcomm_include_root(${name} root)

  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/${name}/*.cc")
  if(DREAMCOMM_CUDA)
    file(GLOB_RECURSE cuda CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/${name}/*.cu")
    list(APPEND sources ${cuda})
    list(FILTER sources EXCLUDE REGEX "_without_cuda\\.cc$") # these stand in for the others
  endif()
  foreach(room IN LISTS floor_WITHOUT)
    list(FILTER sources EXCLUDE REGEX "/csrc/${name}/${room}/")
  endforeach()
  if(sources)
    add_library(${target} STATIC ${sources})
    dreamcomm_compile_options(${target} ${floor_OPTIMIZE})
    dreamcomm_cuda_options(${target})
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wshadow>)
    set(scope PUBLIC)
  else() # headers only
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(${target} ${scope} "${root}")
  target_link_libraries(${target} ${scope} ${lower} Threads::Threads)
endfunction()
