# CUDA kernels: every .cu of the tree becomes one fatbin of machine code (no PTX: nothing is compiled
# on the user's machine), and all of them lie in the library as a table that src/device reads. No
# CUDA compiler: the table is empty, and everything else is as it was. The driver is loaded at run
# time, so no CUDA library is linked either way.
#
#   KV8_CUDA=AUTO  with nvcc where there is one that works (the default)
#   KV8_CUDA=ON    refuse to build without
#   KV8_CUDA=OFF   without
set(KV8_CUDA AUTO CACHE STRING "Compile the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE KV8_CUDA PROPERTY STRINGS AUTO ON OFF)

# Sets KV8_NVCC_RUNS, KV8_NVCC_VERSION, KV8_NVCC_ARCHS (75;80;...;90a) and KV8_NVCC_COMPRESSES
# (machine code takes a tenth of the space; from CUDA 12.8 on, whose drivers all unpack it).
function(kv8_find_nvcc)
  find_program(KV8_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  set(KV8_NVCC_RUNS FALSE PARENT_SCOPE)
  if(NOT KV8_NVCC)
    set(why "nvcc not found")
  else()
    # A compiler that cannot build an empty kernel with the host's headers is none.
    set(probe ${CMAKE_BINARY_DIR}/cuda/probe)
    file(WRITE ${probe}.cu "extern \"C\" __global__ void probe(float *x) { *x = 1; }\n")
    execute_process(COMMAND ${KV8_NVCC} -fatbin -arch=sm_80 -o ${probe}.fatbin ${probe}.cu
      RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
    if(failed)
      set(why "${KV8_NVCC} does not work: ${said}")
    else()
      execute_process(COMMAND ${KV8_NVCC} --version OUTPUT_VARIABLE said)
      string(REGEX MATCH "release ([0-9]+)\\.([0-9]+)" ignored "${said}")
      set(major ${CMAKE_MATCH_1})
      set(KV8_NVCC_VERSION ${CMAKE_MATCH_1}.${CMAKE_MATCH_2} PARENT_SCOPE)
      execute_process(COMMAND ${KV8_NVCC} --list-gpu-code OUTPUT_VARIABLE said)
      string(REGEX MATCHALL "sm_[0-9]+" archs "${said}")
      list(TRANSFORM archs REPLACE "sm_" "")
      foreach(arch ${archs}) # 90a came with CUDA 12, those after it with their own plain number
        if(arch GREATER_EQUAL 90 AND major GREATER_EQUAL 12)
          list(APPEND archs ${arch}a)
        endif()
      endforeach()
      set(KV8_NVCC_ARCHS ${archs} PARENT_SCOPE)
      execute_process(COMMAND ${KV8_NVCC} --help OUTPUT_VARIABLE said)
      string(FIND "${said}" "--compress-mode" at)
      if(NOT at EQUAL -1)
        set(KV8_NVCC_COMPRESSES TRUE PARENT_SCOPE)
      endif()
      set(KV8_NVCC_RUNS TRUE PARENT_SCOPE)
      return()
    endif()
  endif()
  if(KV8_CUDA STREQUAL "ON")
    message(FATAL_ERROR "KV8_CUDA=ON: ${why}")
  endif()
  message(STATUS "CUDA kernels: none, ${why}")
endfunction()

if(NOT KV8_CUDA STREQUAL "OFF" AND NOT (KV8_CUDA STREQUAL "AUTO" AND CMAKE_CROSSCOMPILING))
  kv8_find_nvcc()
endif()
if(KV8_NVCC_RUNS)
  message(STATUS "CUDA kernels: nvcc ${KV8_NVCC_VERSION}")
endif()

# kv8_cuda_source(file.cu ARCHS arch... [MAY_SPILL kernel:bytes...]): one .cu of the calling room.
# ARCHS as nvcc writes them without sm_: 80 runs on 8.x, 90 on 9.x, 90a on 9.0 alone with wgmma. Those
# that this nvcc does not know are left out. scripts/check_cuda fails on kernels that spill registers,
# but for those of MAY_SPILL (regular expressions), up to so many bytes of stores and loads.
function(kv8_cuda_source file)
  cmake_parse_arguments(ARG "" "" "ARCHS;MAY_SPILL" ${ARGN})
  if(NOT ARG_ARCHS OR ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kv8_cuda_source(${file}): ARCHS arch... [MAY_SPILL kernel:bytes...]")
  endif()
  if(NOT KV8_NVCC_RUNS)
    return()
  endif()
  get_filename_component(name ${file} NAME_WE)
  set(archs ${ARG_ARCHS})
  foreach(arch ${ARG_ARCHS})
    if(NOT arch IN_LIST KV8_NVCC_ARCHS)
      list(REMOVE_ITEM archs ${arch})
      message(STATUS "CUDA kernels: ${name}.cu without sm_${arch}, nvcc ${KV8_NVCC_VERSION} "
        "does not know it")
    endif()
  endforeach()
  if(NOT archs)
    return()
  endif()
  # The commands must stand in the directory that owns the target: kv8_embed_cuda() writes them.
  set_property(GLOBAL APPEND PROPERTY KV8_CUDA_IMAGES ${name})
  set_property(GLOBAL PROPERTY KV8_CUDA_SOURCE_${name} ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  set_property(GLOBAL PROPERTY KV8_CUDA_ARCHS_${name} ${archs})
  set_property(GLOBAL PROPERTY KV8_CUDA_MAY_SPILL_${name} ${ARG_MAY_SPILL})
endfunction()

function(kv8_compile_cuda name)
  get_property(source GLOBAL PROPERTY KV8_CUDA_SOURCE_${name})
  get_property(archs GLOBAL PROPERTY KV8_CUDA_ARCHS_${name})
  get_property(may_spill GLOBAL PROPERTY KV8_CUDA_MAY_SPILL_${name})
  set(out ${CMAKE_BINARY_DIR}/cuda/${name})
  string(REPLACE ";" "\n" may_spill "${may_spill}")
  file(WRITE ${out}.may_spill "${may_spill}\n") # for scripts/check_cuda
  set(flags -std=c++17 -O3 -I${CMAKE_SOURCE_DIR}/include)
  foreach(room ${KV8_ROOMS})
    list(APPEND flags -I${CMAKE_SOURCE_DIR}/src/${room}/cuda)
  endforeach()
  if(KV8_WERROR)
    list(APPEND flags -Werror all-warnings)
  endif()
  if(KV8_NVCC_COMPRESSES)
    list(APPEND flags --compress-mode=size)
  endif()
  string(REPLACE ";" " " archs "${archs}")
  string(REPLACE ";" " " flags "${flags}")
  set(script ${CMAKE_SOURCE_DIR}/cmake/compile_cuda.cmake)
  add_custom_command(OUTPUT ${out}.fatbin
    COMMAND ${CMAKE_COMMAND} -DNVCC=${KV8_NVCC} -DSOURCE=${source} -DOUT=${out}
      -DARCHS=${archs} -DFLAGS=${flags} -P ${script}
    DEPENDS ${source} ${script} DEPFILE ${out}.d BYPRODUCTS ${out}.log
    COMMENT "CUDA ${name}.cu for ${archs}" VERBATIM)
endfunction()

# After all rooms: the table.
function(kv8_embed_cuda)
  get_property(images GLOBAL PROPERTY KV8_CUDA_IMAGES)
  set(dir ${CMAKE_BINARY_DIR}/cuda)
  set(table ${CMAKE_BINARY_DIR}/generated/kv8_images.c)
  foreach(image ${images})
    kv8_compile_cuda(${image})
  endforeach()
  set(fatbins ${images})
  list(TRANSFORM fatbins PREPEND ${dir}/)
  list(TRANSFORM fatbins APPEND .fatbin)
  string(REPLACE ";" " " images "${images}")
  add_custom_command(OUTPUT ${table}
    COMMAND ${CMAKE_COMMAND} -DDIR=${dir} "-DIMAGES=${images}" -DTABLE=${table}
      -P ${CMAKE_SOURCE_DIR}/cmake/embed_cuda.cmake
    DEPENDS ${fatbins} ${CMAKE_SOURCE_DIR}/cmake/embed_cuda.cmake
    COMMENT "Table of the CUDA kernels" VERBATIM)
  target_sources(kv8_objects PRIVATE ${table})
  # .incbin is the assembler's: the compiler does not see what the object depends on.
  set_source_files_properties(${table} PROPERTIES OBJECT_DEPENDS "${fatbins}")
  add_custom_target(kv8_cuda DEPENDS ${table}) # all kernels and nothing else, for check_cuda
endfunction()
