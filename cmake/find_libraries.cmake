# kv8_find_library(name header library [REQUIRED]): the target kv8::name for a library that kv8 stands
# on. Read by the build and, installed beside it, by kv8Config.cmake, so that both have the same
# names. A user of the installed shared libraries needs none of them: without REQUIRED, one that is
# not there is an empty target.
function(kv8_find_library name header library)
  if(TARGET kv8::${name})
    return()
  endif()
  find_path(KV8_${name}_INCLUDE ${header} ${ARGN})
  find_library(KV8_${name}_LIBRARY ${library} ${ARGN})
  mark_as_advanced(KV8_${name}_INCLUDE KV8_${name}_LIBRARY)
  add_library(kv8::${name} INTERFACE IMPORTED GLOBAL)
  if(KV8_${name}_INCLUDE AND KV8_${name}_LIBRARY)
    target_include_directories(kv8::${name} INTERFACE ${KV8_${name}_INCLUDE})
    target_link_libraries(kv8::${name} INTERFACE ${KV8_${name}_LIBRARY})
  endif()
endfunction()
