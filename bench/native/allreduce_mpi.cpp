// Benchmark of MPI's all-reduce, timed like the executor in allreduce.cpp: mpirun -np WORLD
// allreduce_mpi [largest MiB]. Built by bench/executor_bandwidth.py.
#define OMPI_SKIP_MPICXX 1  // Open MPI's C++ interface, which causes warnings
#include <mpi.h>

#include <cstring>

#include "measure.h"

namespace {

void reduce(float* data, std::size_t count) {
  MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(count), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  bench::pin(rank);
  const std::size_t largest_bytes = (argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 128) << 20;
  std::vector<float> data(largest_bytes / sizeof(float), 1.0F);
  bench::table({rank, world}, data.data(), largest_bytes, reduce, barrier);
  MPI_Finalize();
  return 0;
}
