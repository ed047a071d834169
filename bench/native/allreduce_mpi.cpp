// Benchmark of MPI's all-reduce, timed like the executor in allreduce.cpp: mpirun -np WORLD
// allreduce_mpi LARGEST_MIB. Built by bench/executor_bandwidth.py.
#define OMPI_SKIP_MPICXX 1  // Open MPI's C++ interface, which causes warnings
#include <mpi.h>

#include "measure.h"

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  MPI_Init(&argc, &argv);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  bench::pin(rank);
  const std::size_t largest_bytes = std::strtoull(argv[1], nullptr, 10) << 20;
  std::vector<float> data(largest_bytes / sizeof(float), 1.0F);
  const auto reduce = [](float* at, std::size_t n) {
    MPI_Allreduce(MPI_IN_PLACE, at, static_cast<int>(n), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  };
  const auto barrier = [] { MPI_Barrier(MPI_COMM_WORLD); };
  bench::RankBench{rank, world, reduce, barrier}.print(data.data(), largest_bytes);
  MPI_Finalize();
  return 0;
}
