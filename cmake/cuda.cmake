# CUDA kernels: every .cu of the tree becomes one fatbin of machine code (no PTX: nothing is compiled
# on the user's machine), and all of them lie in the library as a table that src/device reads. No
# CUDA compiler or no GPU to compile for: the table is empty, and everything else is as it was. The
# driver is loaded at run time, so no CUDA library is linked either way.
#
#   KV8_CUDA=AUTO  with nvcc where there is one that works (the default)
#   KV8_CUDA=ON    refuse to build without kernels
#   KV8_CUDA=OFF   without
#
#   KV8_CUDA_ARCHS=native  for the GPUs of this machine; none: no kernels (the default)
#   KV8_CUDA_ARCHS=all     for all that nvcc knows: wheels, releases, scripts/check_cuda
#   KV8_CUDA_ARCHS=80;90   for GPUs of these compute capabilities: each gets every kernel that runs
#                          on it, so 90 brings the kernels compiled for 90a, and 90a is read as 90
set(KV8_CUDA AUTO CACHE STRING "Compile the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE KV8_CUDA PROPERTY STRINGS AUTO ON OFF)
set(KV8_CUDA_ARCHS native CACHE STRING
  "GPUs to compile CUDA kernels for: native, all, or a list such as 80;90")

# Sets KV8_CUDA_GPUS: "all" or compute capabilities (80;90), empty where there is no GPU.
function(kv8_find_gpus)
  set(gpus ${KV8_CUDA_ARCHS})
  if(gpus STREQUAL "native")
    unset(KV8_PROBE_GPUS_RUNS CACHE) # GPUs come and go between two configurations
    unset(KV8_PROBE_GPUS_COMPILES CACHE)
    try_run(KV8_PROBE_GPUS_RUNS KV8_PROBE_GPUS_COMPILES ${CMAKE_CURRENT_BINARY_DIR}/probe_gpus
      ${CMAKE_CURRENT_SOURCE_DIR}/cmake/probe_gpus.c LINK_LIBRARIES ${CMAKE_DL_LIBS}
      RUN_OUTPUT_VARIABLE gpus)
    string(REGEX MATCHALL "[0-9]+" gpus "${gpus}")
  elseif(NOT gpus STREQUAL "all")
    foreach(gpu ${gpus})
      if(NOT gpu MATCHES "^[1-9][0-9]+[af]?$")
        message(FATAL_ERROR "KV8_CUDA_ARCHS: \"${gpu}\" is not native, all, or a list of compute "
          "capabilities such as 80;90")
      endif()
    endforeach()
    list(TRANSFORM gpus REPLACE "[af]$" "")
  endif()
  list(REMOVE_DUPLICATES gpus)
  set(KV8_CUDA_GPUS "${gpus}" PARENT_SCOPE)
endfunction()

# Sets `out` to those of the architectures whose code runs on a GPU of KV8_CUDA_GPUS: of the same
# major number and a minor one not above the GPU's, or exactly the GPU's where a letter follows.
function(kv8_archs_for_gpus out)
  set(runs "")
  foreach(arch ${ARGN})
    string(REGEX REPLACE "[a-z]$" "" number ${arch})
    math(EXPR major "${number} / 10")
    foreach(gpu ${KV8_CUDA_GPUS})
      if(gpu STREQUAL "all" OR gpu EQUAL number)
        list(APPEND runs ${arch})
      elseif(arch STREQUAL number AND gpu GREATER number)
        math(EXPR gpu_major "${gpu} / 10")
        if(gpu_major EQUAL major)
          list(APPEND runs ${arch})
        endif()
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES runs)
  set(${out} "${runs}" PARENT_SCOPE)
endfunction()

# Sets KV8_NVCC_RUNS, KV8_NVCC_VERSION, KV8_NVCC_ARCHS (75;80;...;90a) and KV8_NVCC_COMPRESSES
# (machine code takes a tenth of the space; from CUDA 12.8 on, whose drivers all unpack it).
function(kv8_find_nvcc)
  find_program(KV8_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
  set(KV8_NVCC_RUNS FALSE PARENT_SCOPE)
  if(NOT KV8_NVCC)
    set(why "nvcc not found when kv8 was built")
  else()
    # A compiler that cannot build an empty kernel with the host's headers is none.
    set(probe ${kv8_BINARY_DIR}/cuda/probe)
    file(WRITE ${probe}.cu "extern \"C\" __global__ void probe(float *x) { *x = 1; }\n")
    execute_process(COMMAND ${KV8_NVCC} -fatbin -arch=sm_80 -o ${probe}.fatbin ${probe}.cu
      RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
    if(failed)
      string(REGEX REPLACE "[\r\n].*" "" said "${said}")
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
  set(KV8_CUDA_NONE "${why}" PARENT_SCOPE)
endfunction()

# KV8_CUDA_NONE says why there are no kernels and how to get them; empty where there are.
set(KV8_CUDA_NONE "")
if(KV8_CUDA STREQUAL "OFF")
  set(KV8_CUDA_NONE "built with KV8_CUDA=OFF")
elseif(CMAKE_CROSSCOMPILING AND KV8_CUDA STREQUAL "AUTO")
  set(KV8_CUDA_NONE "cross-compiled")
else()
  kv8_find_gpus()
  if(KV8_CUDA_GPUS STREQUAL "")
    set(KV8_CUDA_NONE "the machine that built kv8 shows no GPU")
    string(APPEND KV8_CUDA_NONE " (configure with -DKV8_CUDA_ARCHS=all or a list such as 90)")
  else()
    kv8_find_nvcc()
  endif()
endif()
if(KV8_CUDA_NONE AND KV8_CUDA STREQUAL "ON")
  message(FATAL_ERROR "KV8_CUDA=ON: no CUDA kernels: ${KV8_CUDA_NONE}")
endif()

# kv8_cuda_source(file.cu ARCHS arch... [MAY_SPILL kernel:bytes...]): one .cu of the calling room.
# ARCHS as nvcc writes them without sm_: 80 runs on 8.x, 90 on 9.x, 90a on 9.0 alone with wgmma; 100 and
# 120 are made from 90's PTX. Those that no GPU of KV8_CUDA_ARCHS runs and those that this nvcc does not
# know are left out. scripts/check_cuda fails on kernels that spill registers, but for those of MAY_SPILL
# (regular expressions), up to so many bytes of stores and loads.
function(kv8_cuda_source file)
  cmake_parse_arguments(ARG "" "" "ARCHS;MAY_SPILL" ${ARGN})
  if(NOT ARG_ARCHS OR ARG_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "kv8_cuda_source(${file}): ARCHS arch... [MAY_SPILL kernel:bytes...]")
  endif()
  string(REPLACE ";" "," archs "${ARG_ARCHS}") # for tests/driver, which needs no nvcc
  set_property(GLOBAL APPEND PROPERTY KV8_CUDA_SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${file}:${archs})
  if(NOT KV8_NVCC_RUNS)
    return()
  endif()
  get_filename_component(name ${file} NAME_WE)
  kv8_archs_for_gpus(wanted ${ARG_ARCHS})
  set(archs ${wanted})
  foreach(arch ${wanted})
    if(NOT arch IN_LIST KV8_NVCC_ARCHS)
      list(REMOVE_ITEM archs ${arch})
      set_property(GLOBAL APPEND PROPERTY KV8_CUDA_UNKNOWN_ARCHS ${arch})
    endif()
  endforeach()
  set_property(GLOBAL APPEND PROPERTY KV8_CUDA_KNOWN_ARCHS ${archs})
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
  set(out ${kv8_BINARY_DIR}/cuda/${name})
  string(REPLACE ";" "\n" may_spill "${may_spill}")
  file(WRITE ${out}.may_spill "${may_spill}\n") # for scripts/check_cuda
  set(flags -std=c++17 -O3 -I${kv8_SOURCE_DIR}/include)
  foreach(room ${KV8_ROOMS})
    list(APPEND flags -I${kv8_SOURCE_DIR}/src/${room}/cuda)
  endforeach()
  if(KV8_WERROR)
    list(APPEND flags -Werror all-warnings)
  endif()
  if(KV8_NVCC_COMPRESSES)
    list(APPEND flags --compress-mode=size)
  endif()
  string(REPLACE ";" " " archs "${archs}")
  string(REPLACE ";" " " flags "${flags}")
  set(script ${kv8_SOURCE_DIR}/cmake/compile_cuda.cmake)
  add_custom_command(OUTPUT ${out}.fatbin
    COMMAND ${CMAKE_COMMAND} -DNVCC=${KV8_NVCC} -DSOURCE=${source} -DOUT=${out}
      -DARCHS=${archs} -DFLAGS=${flags} -P ${script}
    DEPENDS ${source} ${script} DEPFILE ${out}.d BYPRODUCTS ${out}.log
    COMMENT "CUDA ${name}.cu for ${archs}" VERBATIM)
endfunction()

# Sets `out` to what the table says of itself, in one line: for which GPUs, what is left out and how
# to get it.
function(kv8_describe_cuda out)
  if(KV8_CUDA_NONE)
    set(${out} "none: ${KV8_CUDA_NONE}" PARENT_SCOPE)
    return()
  endif()
  foreach(which KNOWN UNKNOWN)
    get_property(${which} GLOBAL PROPERTY KV8_CUDA_${which}_ARCHS)
    list(REMOVE_DUPLICATES ${which})
    list(SORT ${which} COMPARE NATURAL)
    list(TRANSFORM ${which} PREPEND sm_)
    string(REPLACE ";" " " ${which} "${${which}}")
  endforeach()
  string(REPLACE ";" " " gpus "${KV8_CUDA_GPUS}")
  set(note "${KNOWN}")
  if(KNOWN STREQUAL "")
    set(note "none: KV8_CUDA_ARCHS asked for ${gpus}")
  endif()
  if(UNKNOWN)
    string(APPEND note ", not ${UNKNOWN}, which nvcc ${KV8_NVCC_VERSION} does not know")
  endif()
  if(KV8_CUDA_ARCHS STREQUAL "native")
    string(APPEND note " (GPUs here: ${gpus}, for others configure with -DKV8_CUDA_ARCHS=all)")
  elseif(NOT KV8_CUDA_GPUS STREQUAL "all")
    string(APPEND note " (for other GPUs configure with -DKV8_CUDA_ARCHS=all)")
  endif()
  set(${out} "${note}" PARENT_SCOPE)
endfunction()

# After all rooms: the table.
function(kv8_embed_cuda)
  kv8_describe_cuda(note)
  message(STATUS "CUDA kernels: ${note}")
  get_property(images GLOBAL PROPERTY KV8_CUDA_IMAGES)
  set(dir ${kv8_BINARY_DIR}/cuda)
  set(table ${kv8_BINARY_DIR}/generated/kv8_images.c)
  foreach(image ${images})
    kv8_compile_cuda(${image})
  endforeach()
  set(fatbins ${images})
  list(TRANSFORM fatbins PREPEND ${dir}/)
  list(TRANSFORM fatbins APPEND .fatbin)
  string(REPLACE ";" " " images "${images}")
  add_custom_command(OUTPUT ${table}
    COMMAND ${CMAKE_COMMAND} -DDIR=${dir} "-DIMAGES=${images}" -DTABLE=${table} "-DNOTE=${note}"
      -P ${kv8_SOURCE_DIR}/cmake/embed_cuda.cmake
    DEPENDS ${fatbins} ${kv8_SOURCE_DIR}/cmake/embed_cuda.cmake
    COMMENT "Table of the CUDA kernels" VERBATIM)
  target_sources(kv8_objects PRIVATE ${table})
  # .incbin is the assembler's: the compiler does not see what the object depends on.
  set_source_files_properties(${table} PROPERTIES OBJECT_DEPENDS "${fatbins}")
  add_custom_target(kv8_cuda DEPENDS ${table}) # all kernels and nothing else, for check_cuda
endfunction()
