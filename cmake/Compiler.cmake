# What every target is compiled with.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  dreamcomm_stop("dreamcomm needs g++ 11 or newer for C++20; found ${CMAKE_CXX_COMPILER_VERSION}. Install one and set CXX=g++-11 or similar.")
endif()

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Several sources at a time where most of the work is to read headers: half of the time.
if(NOT DEFINED CMAKE_UNITY_BUILD)
  set(CMAKE_UNITY_BUILD ON)
  set(CMAKE_UNITY_BUILD_BATCH_SIZE 6)
endif()
# torch's wheels use the new std::string, also where the compiler's default is the old one.
add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=1)

find_package(Threads REQUIRED)

if(DREAMCOMM_SANITIZE)
  if(NOT DREAMCOMM_BUILD_TESTS)
    dreamcomm_stop("DREAMCOMM_SANITIZE is for the C++ tests: set DREAMCOMM_BUILD_TESTS=ON as well.")
  elseif(DREAMCOMM_SANITIZE STREQUAL "thread")
    set(sanitizers -fsanitize=thread)
  elseif(DREAMCOMM_SANITIZE STREQUAL "address")
    set(sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all)
    # The address sanitizer also finds most accesses by a null pointer or beyond an object. Without
    # these checks of each access the build takes a quarter less.
    if(NOT DREAMCOMM_SANITIZE_ALL)
      list(APPEND sanitizers -fno-sanitize=null,object-size,vptr)
    endif()
  else()
    dreamcomm_stop("DREAMCOMM_SANITIZE must be empty, thread or address; got ${DREAMCOMM_SANITIZE}.")
  endif()
  add_compile_options(-g1 -fno-omit-frame-pointer ${sanitizers}) # lines for stacks, no variables
  add_link_options(${sanitizers})
endif()

# Warnings and the optimization level of a target of this project.
function(dreamcomm_compile_options target level)
  if(DREAMCOMM_SANITIZE)
    set(level -O1) # more would double the compile time of instrumented code
  endif()
  target_compile_options(${target} PRIVATE
    $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:${level}>
    $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  if(DREAMCOMM_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
  endif()
endfunction()
