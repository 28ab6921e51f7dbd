// rescale(acc) of docs/integer_network.md, linear layers: sums in another unit, the residual added, saturated.
// A sum a cycle; the output is that of the sum one cycle before.
module rescale #(
    parameter int OUT = 8  // bits of the output: 8, 16 or 32
) (
    input  logic                  clk,
    input  logic signed [31:0]    acc,         // sum of products
    input  logic        [4:0]     left,        // of the layer, 0 to 30
    input  logic signed [31:0]    bias,        // b of the output
    input  logic signed [31:0]    multiplier,  // R of the output, 0 to 2^31 - 1
    input  logic signed [15:0]    residual,    // 0 where there is none
    output logic signed [31:0]    rescaled,    // before residual and saturation, as GELU takes it; not registered
    output logic signed [OUT-1:0] y
);
    logic signed [31:0] sum;
    logic signed [32:0] total;
    logic signed [OUT-1:0] fitted;

    assign sum = (acc <<< left) + bias;
    mul_round #(.SHIFT(32)) product (.a(sum), .b(multiplier), .y(rescaled));
    assign total = 33'(rescaled) + 33'(residual);
    saturate #(.IN(33), .OUT(OUT)) fit (.x(total), .y(fitted));
    always_ff @(posedge clk) y <= fitted;
endmodule
